"""The engine you would write on a whiteboard: pure PyTorch, slow, obviously right.

Read it in this order: `config`, `request`, `weights`, `tokenizer` (the contract, shared with `fast`), then
`model`, `cache`, `sampling`, `blocks`, `batch` and `engine`.
"""
