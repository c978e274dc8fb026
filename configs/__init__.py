"""Configs, one a model or study; each opens with its command and what it gives."""
