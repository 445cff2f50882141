"""What a row sees of the vocabulary: all of it, the tokens it kept, or this rank's part."""
