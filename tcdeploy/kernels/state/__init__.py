"""What layers keep between steps: its tensors, and mechanisms that keep it in slots."""
