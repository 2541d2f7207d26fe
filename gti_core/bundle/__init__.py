"""Bundles: immutable base versions on disk."""

from gti_core.bundle.format import DEMO_BUNDLE, Bundle, load_bundle
from gti_core.bundle.merge import materialize, tokenizer_folder

__all__ = ["DEMO_BUNDLE", "Bundle", "load_bundle", "materialize", "tokenizer_folder"]
