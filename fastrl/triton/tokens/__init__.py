"""The policy loss over tokens."""
