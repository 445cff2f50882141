"""The reverse scan of generalised advantage estimation."""
