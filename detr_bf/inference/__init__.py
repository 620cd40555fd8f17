"""Trained models: loading, fine-tuning in one call, prediction, exported files, and an HTTP server."""
