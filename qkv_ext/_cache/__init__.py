"""The inside of a KVCache: its pages, what is stored in them, and its checks."""
