"""The linear forms: the LM head applied a chunk of rows at a time."""
