"""Number formats: the codec that rounds and packs, its reference, its compiled forms."""
