"""One file a table; the package above says what each must have."""
