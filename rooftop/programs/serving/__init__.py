"""The serving step: a paged KV cache, decoding, quantised weights and sampling."""
