"""The linear forms: functions of hidden states, whose logits exist only a chunk at a time."""
