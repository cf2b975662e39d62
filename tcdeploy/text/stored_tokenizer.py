"""The tokenizer of a start from packages: built on the tokenizers library, without transformers.

A start that has transformers writes a `TokenizerRecord` (text/tokenizer.py, `describe_tokenizer`). `StoredTokenizer`
offers what `generate` and `serve` use of a tokenizer, with the results of transformers' classes; tests compare them.

transformers builds the backend of some families in Python, from several files. Such a backend is stored as JSON.
If it equals the model's tokenizer.json, which is usual, that file is read and no copy is stored: it can have 17 MB.

Imports tokenizers only when one is loaded, and no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tcdeploy.errors import ModelError

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

TOKENIZER_FILE = "tokenizer.json"
# What transformers' `clean_up_tokenization` replaces, in this order: spaces that WordPiece puts before punctuation.
SPACE_REPLACEMENTS = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"),
    (" n't", "n't"), (" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip


@dataclass(frozen=True)
class TokenizerRecord:
    """What a start record holds of a tokenizer.

    backend: path of the backend's JSON in the cache folder; "" if it equals the model's tokenizer.json.
    special_tokens: by name, such as `eos_token`. special_ids: of these and of further special tokens.
    response_template: of the tokenizer or its family, for parsing tool calls.
    """

    class_name: str
    backend: str
    special_tokens: dict[str, str]
    special_ids: tuple[int, ...]
    eos_token_id: int | None
    chat_template: str | dict[str, str] | None
    response_template: dict[str, Any] | None
    cleans_up_spaces: bool


class Encoded(NamedTuple):
    input_ids: list[int]


class StoredTokenizer:
    """The attributes and methods of transformers' fast tokenizers that this package uses."""

    def __init__(self, record: TokenizerRecord, backend: Tokenizer) -> None:
        """`backend` must neither truncate nor pad."""
        self._record = record
        self.backend_tokenizer = backend
        self.class_name = record.class_name
        self.chat_template = record.chat_template
        self.response_template = record.response_template
        self.eos_token_id = record.eos_token_id
        self.all_special_ids = list(record.special_ids)
        self.special_tokens_map = dict(record.special_tokens)
        self.bos_token = record.special_tokens.get("bos_token")
        self.eos_token = record.special_tokens.get("eos_token")
        self.pad_token = record.special_tokens.get("pad_token")
        self.unk_token = record.special_tokens.get("unk_token")

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        return self.backend_tokenizer.get_added_tokens_decoder()

    def __call__(self, text: str, add_special_tokens: bool = True) -> Encoded:
        return Encoded(self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text: str = self.backend_tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        if self._record.cleans_up_spaces:
            for spaced, replacement in SPACE_REPLACEMENTS:
                text = text.replace(spaced, replacement)
        return text

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        return self.backend_tokenizer.id_to_token(token_id)

    def get_chat_template(self, chat_template: None = None, tools: list[dict[str, Any]] | None = None) -> str:
        """The template of a conversation with these tools. Raises ValueError if the model has none for it."""
        templates = self.chat_template
        if isinstance(templates, dict):
            name = "tool_use" if tools is not None and "tool_use" in templates else "default"
            if name not in templates:
                raise ValueError(f"the model has chat templates, but none is the default: {', '.join(templates)}")
            return templates[name]
        if templates is None:
            raise ValueError("the model has no chat template")
        return templates


def load_stored_tokenizer(record: TokenizerRecord, cache_dir: Path, model_folder: Path) -> StoredTokenizer:
    """Raises ModelError if the file of the backend cannot be read."""
    if record.backend:
        return StoredTokenizer(record, read_backend(cache_dir / record.backend, "use another --cache-dir"))
    return StoredTokenizer(record, read_backend(model_folder / TOKENIZER_FILE))


def read_backend(path: Path, hint: str = "download the tokenizer's files again") -> Tokenizer:
    """The backend in a tokenizer.json, without its truncation and padding. Raises ModelError with `hint`."""
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception
        raise ModelError(f"{path} cannot be read: {error}", hint) from error
    backend.no_truncation()
    backend.no_padding()
    return backend
