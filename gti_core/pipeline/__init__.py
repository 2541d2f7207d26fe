"""The pipeline: prepare -> tokenize -> ground -> finetune -> evaluate, export."""
