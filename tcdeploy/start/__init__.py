"""From a recipe to a running deployment."""
