"""Text in domains: documents are read piece by piece, tokenised once, and cut into rows, each of one document."""
