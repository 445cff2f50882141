"""The reverse scan of generalized advantage estimation."""
