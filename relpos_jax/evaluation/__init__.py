"""Evaluation: perplexity by length under four protocols, and studies of encodings."""
