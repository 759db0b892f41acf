"""What coordinator, loaders and workers share: segments, their manifests, and the wire.

Nothing here knows torch, and nothing here imports `coordinator` or `gpu_worker`.
"""
