"""The engine that applies fixes to installed SGLang packages and takes them back to the byte."""
