"""From item text to a distinct semantic ID: text encoder, codebooks, collision handling."""
