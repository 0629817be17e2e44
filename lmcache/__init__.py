"""The names that the documents use; everything is lmcache_sdk's. Nothing is defined here."""
