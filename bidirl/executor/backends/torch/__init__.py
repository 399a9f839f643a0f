"""The training role on torch: tiny models, tasks, the loss, one replica's trainer, merges, checkpoints.

Import modules by their full name. Only ``loss``, ``states``, ``sharded``, ``checkpoint`` and ``trainer``
need torch.
"""
