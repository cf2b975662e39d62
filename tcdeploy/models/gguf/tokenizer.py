"""tokenizer.json and tokenizer_config.json of a GGUF model, from the metadata of its file.

`tokenizer.ggml.model` names one of two kinds of BPE. "gpt2" has tokens in the alphabet of byte-level BPE, the merges,
and in `tokenizer.ggml.pre` the name of the expression that splits text before. "llama" is SentencePiece: spaces are
U+2581, bytes are tokens such as <0x0A>, and merges follow from the vocabulary and its scores. Other kinds are refused,
and so are names of expressions that are not known, because text would be split into other tokens.

transformers 5.17 and 5.23 convert these vocabularies differently, so neither is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tcdeploy.errors import ModelError, UnsupportedModelError
from tcdeploy.models.gguf.config import HINT
from tcdeploy.models.weights.gguf_names import ARCHITECTURE_KEY

PREFIX = "tokenizer.ggml"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # types of tokens
SPACE = "\u2581"
SPECIAL_TOKENS = {
    "bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}  # fmt: skip
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words_and_digits(digits: str) -> str:
    return rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased_words(ending: str, digits: str) -> str:
    start = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


class Split(NamedTuple):
    """How text is split before BPE. pattern: "" for that of GPT-2. ignores_merges: a word that is a token stays one."""

    pattern: str = ""
    adds_bos: bool = False
    ignores_merges: bool = False
    is_normalised: bool = False  # NFC
    has_single_digits: bool = False


LLAMA3 = Split(_words_and_digits(r"\p{N}{1,3}"), adds_bos=True, ignores_merges=True)
# By `tokenizer.ggml.pre`
SPLITS = {
    "gpt-2": Split(), "smollm": Split(has_single_digits=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), LLAMA3),
    "dbrx": LLAMA3._replace(adds_bos=False, ignores_merges=False),
    "qwen2": Split(_words_and_digits(r"\p{N}"), is_normalised=True),
    "deepseek-r1-qwen": Split(_words_and_digits(r"\p{N}"), adds_bos=True, is_normalised=True),
    "tekken": Split(_cased_words("", r"\p{N}"), adds_bos=True, ignores_merges=True),
    "gpt-4o": Split(_cased_words(f"{_ENDINGS}?", r"\p{N}{1,3}")),
}  # fmt: skip


QWEN2_SPLITS = ("qwen2", "deepseek-r1-qwen")  # transformers splits text of all models of the type qwen2 like this


class Vocabulary(NamedTuple):
    """Of the file. types: of each token. scores: empty for byte-level BPE."""

    tokens: list[str]
    types: list[int]
    scores: list[float]


def tokenizer_from_metadata(path: Path, metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """tokenizer.json and tokenizer_config.json. Raises ModelError, and UnsupportedModelError for other kinds."""
    kind, architecture = metadata.get(f"{PREFIX}.model"), metadata.get(ARCHITECTURE_KEY)
    vocabulary = _vocabulary(path, metadata)
    if architecture == "qwen2" and (pre := metadata.get(f"{PREFIX}.pre")) not in QWEN2_SPLITS:
        raise UnsupportedModelError(f"{path} has {PREFIX}.pre = {pre}, which is not supported for {architecture}", HINT)
    if kind == "gpt2":
        parts, adds_bos = _byte_level(path, vocabulary, metadata)
    elif kind == "llama":
        parts, adds_bos = _sentencepiece(path, vocabulary, metadata)
    else:
        raise UnsupportedModelError(f"{path} has {PREFIX}.model = {kind}, which is not supported", HINT)
    special = {name: _token(path, metadata, vocabulary, key) for name, key in SPECIAL_TOKENS.items()}
    parts["model"]["unk_token"] = special["unk_token"] if kind == "llama" else None
    around = {"bos": metadata.get(f"{PREFIX}.add_bos_token", adds_bos), "eos": metadata.get(f"{PREFIX}.add_eos_token")}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, **parts,
        "added_tokens": _added_tokens(vocabulary, kind == "llama" and architecture == "phi3"),
        "post_processor": _template({f"{name}_token": special[f"{name}_token"] for name in around if around[name]},
                                    vocabulary),
    }  # fmt: skip
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special,
        "model_max_length": metadata.get(f"{architecture}.context_length"),
    }  # fmt: skip
    if template := metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    return tokenizer, settings


def _vocabulary(path: Path, metadata: Mapping[str, Any]) -> Vocabulary:
    tokens, types = _list(path, metadata, "tokens"), metadata.get(f"{PREFIX}.token_type")
    types = [NORMAL] * len(tokens) if types is None else types
    scores = metadata.get(f"{PREFIX}.scores") or []
    for key, values in (("token_type", types), ("scores", scores)):
        if not isinstance(values, list):
            raise ModelError(f"{path} has {PREFIX}.{key} = {values!r:.40}, which is no list", HINT)
        if values and len(values) != len(tokens):
            raise ModelError(f"{path} has {len(tokens)} tokens, but {len(values)} of {PREFIX}.{key}", HINT)
    return Vocabulary(tokens, types, scores)


def _list(path: Path, metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(f"{PREFIX}.{key}")
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ModelError(f"{path} has no list {PREFIX}.{key} in its metadata", HINT)
    return values


def _token(path: Path, metadata: Mapping[str, Any], vocabulary: Vocabulary, key: str) -> str | None:
    number = metadata.get(f"{PREFIX}.{key}")
    if number is None:
        return None
    if not isinstance(number, int) or not 0 <= number < len(vocabulary.tokens):
        raise ModelError(f"{path} has {PREFIX}.{key} = {number}, but {len(vocabulary.tokens)} tokens", HINT)
    return vocabulary.tokens[number]


def _byte_level(path: Path, vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    name = metadata.get(f"{PREFIX}.pre")
    split = SPLITS.get(str(name))
    if split is None:
        raise UnsupportedModelError(f"{path} has {PREFIX}.pre = {name}, which is not supported", HINT)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": not split.pattern}
    splits: list[dict[str, Any]] = []
    if split.pattern:
        pattern = {"Regex": split.pattern}
        splits.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
    if split.has_single_digits:
        splits.append({"type": "Digits", "individual_digits": True})
    merges = [merge.split(" ") for merge in _list(path, metadata, "merges")]
    # Tokens that are not used fill the vocabulary up to the rows of the embedding.
    used = zip(vocabulary.tokens, vocabulary.types, strict=True)
    ids = {token: number for number, (token, kind) in enumerate(used) if kind != UNUSED}
    return {
        "normalizer": {"type": "NFC"} if split.is_normalised else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, byte_level]},
        "decoder": byte_level, "model": {**_bpe(ids, merges), "ignore_merges": split.ignores_merges},
    }, split.adds_bos  # fmt: skip


def _sentencepiece(path: Path, vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    normalizers: list[dict[str, Any]] = [spaces]
    decoders: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    if metadata.get(f"{PREFIX}.add_space_prefix", True):
        normalizers = [{"type": "Prepend", "prepend": SPACE}, spaces]
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    if not vocabulary.scores:
        raise ModelError(f"{path} has no list {PREFIX}.scores in its metadata", HINT)
    ids = {token: number for number, token in enumerate(vocabulary.tokens)}
    merges = _merges(vocabulary, str(metadata.get(ARCHITECTURE_KEY)).startswith("gemma"))
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers}, "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {**_bpe(ids, merges), "byte_fallback": True, "fuse_unk": True},
    }, True  # fmt: skip


def _merges(vocabulary: Vocabulary, is_in_order: bool) -> list[list[str]]:
    """Every split of a token into two, best token first. is_in_order: the first token is best, whatever its score."""
    kinds = zip(vocabulary.tokens, vocabulary.types, strict=True)
    ids = {token: number for number, (token, kind) in enumerate(kinds) if kind in (NORMAL, USER_DEFINED)}
    ranked = [
        (number if is_in_order else -vocabulary.scores[number], ids[token[:at]], ids[token[at:]], token, at)
        for token, number in ids.items()
        for at in range(1, len(token))
        if token[:at] in ids and token[at:] in ids
    ]
    return [[token[:at], token[at:]] for *_, token, at in sorted(ranked)]


def _bpe(vocab: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
        "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": merges,
    }  # fmt: skip


def _added_tokens(vocabulary: Vocabulary, strips_right: bool) -> list[dict[str, Any]]:
    """Tokens that are found in text before it is split. strips_right: as the tokens of a chat with Phi 3."""
    kept = ("<unk>", "<s>", "<|endoftext|>")
    return [
        {"id": number, "content": token, "single_word": False, "lstrip": False, "normalized": False,
         "rstrip": strips_right and token not in kept, "special": kind != USER_DEFINED}
        for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]  # fmt: skip


def _template(around: Mapping[str, str | None], vocabulary: Vocabulary) -> dict[str, Any] | None:
    """Adds `bos_token` and `eos_token` to text."""
    tokens = {name: token for name, token in around.items() if token is not None}
    if not tokens:
        return None
    names = {token: {"SpecialToken": {"id": token, "type_id": 0}} for token in tokens.values()}
    begin = [names[tokens["bos_token"]]] if "bos_token" in tokens else []
    end = [names[tokens["eos_token"]]] if "eos_token" in tokens else []
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    special = {token: {"id": token, "ids": [vocabulary.tokens.index(token)], "tokens": [token]} for token in names}
    return {
        "type": "TemplateProcessing", "single": [*begin, first, *end],
        "pair": [*begin, first, *end, *begin, second, *end], "special_tokens": special,
    }  # fmt: skip
