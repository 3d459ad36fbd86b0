"""Operations on rows of tokens, each with a backward of its own."""
