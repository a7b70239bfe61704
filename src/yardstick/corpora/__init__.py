"""Texts, token windows and the manifest that pins them."""
