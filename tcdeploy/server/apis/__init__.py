"""What the HTTP APIs share: answers, and turns of a conversation."""
