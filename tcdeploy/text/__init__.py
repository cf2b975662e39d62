"""From messages to token ids, and from token ids to text: tokenizers, chat templates, formats of tool calls."""
