"""Prompts: read, tokenized and dealt to the steps; and tasks that need no download."""
