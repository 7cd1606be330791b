"""GGUF files: heads, blocks of every type, names and layouts of llama.cpp."""
