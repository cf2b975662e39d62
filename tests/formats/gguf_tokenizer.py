"""Small tokenizers as models of the Hub have them, and the metadata that llama.cpp's converter makes of each.

The tokenizers are built with the library tokenizers, with the expressions of the models: that of Llama 3, Qwen 2,
Mistral (tekken), gpt-oss and GPT-2 for byte-level BPE, and the normaliser of Llama 2 for SentencePiece's. In GGUF, a
byte-level vocabulary is written as it is. SentencePiece's has scores instead of merges: the better a token, the higher.
"""

from __future__ import annotations

import json
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

Entries = dict[str, tuple[str, Any]]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog doesn't mind, and THE FOX doesn't either.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich, und Ωμέγα folgt nach 12345 Metern.",
    "def function(values):\n    return [value + 1 for value in values]\n\n\nprint(function([1, 2, 3]))\n",
] * 4
TEXTS = [
    "The quick brown fox", " leading", "  two  and   three spaces ", "doesn't DON'T we'Re", "12345 1 22 333 4444",
    "Zwölf über Ωμέγα 日本語 \U0001f600", "cafe\u0301 and café", "line\n\n\nnext\r\n\ttab \n",
    "def f(x):\n    return x", "<|start|>user\nHi<|end|>\n", "a<think> b </think>c", "CamelCaseWORDSand/slashes//\n",
    "<s>[INST] Hi [/INST]",
]  # fmt: skip
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "llama-bpe": LLAMA3, "dbrx": LLAMA3, "qwen2": QWEN2, "deepseek-r1-qwen": QWEN2, "tekken": TEKKEN, "gpt-4o": GPT_4O,
    "gpt-2": "", "smollm": "",
}  # fmt: skip
ADD_BOS = ("llama-bpe", "tekken", "deepseek-r1-qwen")
TEMPLATE = (
    "{{ bos_token or '' }}{% for message in messages %}<|start|>{{ message.role }}\n{{ message.content }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
CONTROL, USER_DEFINED = ("<|end|>", "<|start|>", "<|begin|>"), ("<think>", "</think>")
BYTES = [f"<0x{number:02X}>" for number in range(256)]


def byte_level(pre: str) -> Tokenizer:
    """Trained on CORPUS, with 3 control and 2 added tokens after the others."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "tekken")))
    tokenizer.normalizer = normalizers.NFC() if pre in ("qwen2", "deepseek-r1-qwen") else None
    ending = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not PATTERNS[pre])
    first = [pre_tokenizers.Split(Regex(PATTERNS[pre]), "isolated")] if PATTERNS[pre] else []
    first += [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, ending])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    _add(tokenizer)
    if pre in ADD_BOS:
        _begin_with(tokenizer, "<|begin|>")
    return tokenizer


def sentencepiece(has_prefix: bool = True, strips: bool = False) -> Tokenizer:
    """As Llama 2 has it: <unk>, <s>, </s>, the bytes, and tokens that were trained on CORPUS.

    Gemma adds no space in front. strips: space after a token of a chat is dropped, as in Phi 3.
    """
    marked = [text.replace(" ", "\u2581") for text in CORPUS]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("\u2581+[^\u2581\n]*|[^\u2581]+"), "isolated")
    trained.train_from_iterator(marked, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=lambda piece: model["vocab"][piece])
    merged = [piece for piece in pieces if len(piece) > 1] + ["\u2581\u2581"] * ("\u2581\u2581" not in pieces)
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *merged, *(piece for piece in pieces if len(piece) == 1)]
    ids = {token: number for number, token in enumerate(tokens)}
    merges = [
        (piece[:at], piece[at:])
        for piece in merged
        for _, _, at in sorted(
            (ids[piece[:at]], ids[piece[at:]], at)
            for at in range(1, len(piece)) if piece[:at] in ids and piece[at:] in ids
        )
    ]  # fmt: skip
    model = models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    mark = normalizers.Replace(" ", "\u2581")
    prepend = [normalizers.Prepend("\u2581")] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prepend, mark])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    replace = decoders.Replace("\u2581", " ")
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), *strip])
    for token in ("<unk>", "<s>", "</s>"):
        is_stripped = strips and token == "</s>"
        tokenizer.add_special_tokens([AddedToken(token, rstrip=is_stripped, normalized=False, special=True)])
    _add(tokenizer, strips)
    _begin_with(tokenizer, "<s>")
    return tokenizer


def _add(tokenizer: Tokenizer, strips: bool = False) -> None:
    control = [AddedToken(token, rstrip=strips, normalized=False, special=True) for token in CONTROL]
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens([AddedToken(token, rstrip=strips, normalized=False) for token in USER_DEFINED])


def _begin_with(tokenizer: Tokenizer, token: str) -> None:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, tokenizer.token_to_id(token))]
    )


def metadata_of(tokenizer: Tokenizer, pre: str, rows: int) -> Entries:
    """The entries. pre: "" for SentencePiece. rows: of the embedding; tokens that are missing are unused ones."""
    model = json.loads(tokenizer.to_str())["model"]
    count = tokenizer.get_vocab_size()
    tokens = [str(tokenizer.id_to_token(number)) for number in range(count)]
    kinds = {**dict.fromkeys(BYTES, 6), "<unk>": 2, **dict.fromkeys((*CONTROL, "<s>", "</s>"), 3)}
    kinds |= dict.fromkeys(USER_DEFINED, 4)
    types = [kinds.get(token, 1) for token in tokens] + [5] * (rows - count)
    begin, end = ("<|begin|>", "<|end|>") if pre else ("<s>", "</s>")
    merges = [" ".join(merge) for merge in model["merges"]]
    scores = [float(-number) for number in range(rows)]
    kind: Entries = (
        {"tokenizer.ggml.pre": ("STRING", pre), "tokenizer.ggml.merges": ("ARRAY", merges)}
        if pre else {"tokenizer.ggml.scores": ("F32", scores), "tokenizer.ggml.unknown_token_id": ("U32", 0)}
    )  # fmt: skip
    return {
        "tokenizer.ggml.model": ("STRING", "gpt2" if pre else "llama"),
        "tokenizer.ggml.tokens": ("ARRAY", tokens + [f"[PAD{number}]" for number in range(count, rows)]),
        "tokenizer.ggml.token_type": ("I32", types),
        "tokenizer.ggml.bos_token_id": ("U32", tokenizer.token_to_id(begin)),
        "tokenizer.ggml.eos_token_id": ("U32", tokenizer.token_to_id(end)),
        "tokenizer.chat_template": ("STRING", TEMPLATE), **kind,
    }  # fmt: skip
