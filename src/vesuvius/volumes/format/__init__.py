"""How an array is stored: metadata, axes, levels, shards, codecs.  In: documents and bytes.  Out: their meaning."""
