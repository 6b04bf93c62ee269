"""Number formats and what is done to numbers in them: the codec, its reference, its compiled forms."""
