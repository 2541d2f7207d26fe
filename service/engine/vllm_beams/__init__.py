"""Beams inside vLLM's worker: one recommendation is one pooling request.

``plugin`` registers the model classes with vLLM, ``model`` wraps a decoder class, ``pooler`` takes
the finished prompts of a step, ``decoder`` runs the remaining levels for all of them together,
``scratch`` owns the KV blocks of the beams, ``worker`` makes room for those blocks and answers
remote calls, ``wire`` is what both sides of the process boundary agree on.
"""
