"""New items online: from texts to semantic IDs and grounded rows, judged before they serve."""
