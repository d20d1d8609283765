"""The doctor: small checks of an installation, one file a subject; each says what is true and what to do about it."""
