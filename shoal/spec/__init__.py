"""The nouns as frozen dataclasses, validated when they are built."""
