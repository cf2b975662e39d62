"""Parses outputs in gpt-oss's Harmony format: messages with a channel, `<|channel|>NAME<|message|>TEXT<|end|>`.

`analysis` is reasoning; `final`, and `commentary` without recipient, are content. A message to a recipient
(`to=functions.NAME`, in the header before or after the channel) is a call whose text is the arguments. The prompt ends
with `<|start|>assistant`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tcdeploy.server.output.json_text import ObjectCall
from tcdeploy.server.output.parser import PartsBuilder, SteppingParser, log_malformed

MESSAGE = "<|message|>"
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
MAX_HEADER_CHARS = 512
MAX_REPARSED_CHARS = 8192  # of unfinished arguments, which are parsed again at the end of the output
_TEXT_ENDS = re.compile(r"^(<\|(end|call|return)\|>)+")
_HEADER_START = re.compile(r"\s*(<\|(start|channel|constrain)\|>|to=|$)")
_FIRST_MARK = re.compile("|".join(map(re.escape, MESSAGE_ENDS)))
_ROLE = re.compile(r"\s*(assistant\b|to=|$)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


class HarmonyParser(SteppingParser):
    """The output of one choice."""

    def __init__(self, *, max_calls: int | None = None) -> None:
        super().__init__(PartsBuilder(max_calls))
        self._emit: Callable[[str], None] = self._builder.add_content
        self._step = self._read_header

    def _read_header(self, is_last: bool) -> bool:
        self._buffer = _TEXT_ENDS.sub("", self._buffer)
        end = self._buffer.find(MESSAGE, 0, MAX_HEADER_CHARS)
        if end < 0:
            is_text = len(self._buffer) >= MAX_HEADER_CHARS or (is_last and not _HEADER_START.match(self._buffer))
            if is_text:
                self._builder.add_content(self._buffer[:1])  # it may begin a delimiter, which would end the text again
                self._buffer = self._buffer[1:]
                self._emit, self._step = self._builder.add_content, self._read_text
            return is_text
        header, self._buffer = self._buffer[:end], self._buffer[end + len(MESSAGE) :]
        text = _FIRST_MARK.split(header, maxsplit=1)[0]
        if text != header and not _ROLE.match(text):  # of a message without header, or one that is continued
            self._builder.add_content(text)
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None:
            self._call = ObjectCall(0, recipient[1])
            self._step = self._read_call
        else:
            is_reasoning = channel is not None and channel[1] == "analysis"
            self._emit = self._builder.add_reasoning if is_reasoning else self._builder.add_content
            self._builder.end_content()
            self._step = self._read_text
        return True

    def _read_text(self, is_last: bool) -> bool:
        if self._find(MESSAGE_ENDS, is_last, self._emit) is None:
            return False
        self._step = self._read_header
        return True

    def _read_call(self, is_last: bool) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        try:
            if not self._buffer.startswith("{"):
                raise ValueError("its arguments are not a JSON object")
            end = self._call.find_end(self._buffer)
        except (ValueError, RecursionError) as error:
            self._fail(error)
            return True
        if end is None:
            if is_last:  # messages may follow in the text that is not a call
                self._fail("the output ends inside the call")
                text, self._buffer = self._buffer, ""
                self._parse(text[:MAX_REPARSED_CHARS])
                self._buffer += text[MAX_REPARSED_CHARS:]
            return is_last
        self._builder.add_calls(self._call.calls)
        self._buffer = self._buffer[end:]
        self._emit = self._builder.add_content
        self._step = self._read_text
        return True

    def _fail(self, reason: object) -> None:
        """Treat the text of the message as content. That of a truncated call is not counted as malformed."""
        if self._end in (None, "complete"):
            self.num_malformed += 1
            log_malformed(reason)
        self._emit, self._step = self._builder.add_content, self._read_text
