"""Where ranks are born."""
