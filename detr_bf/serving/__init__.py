"""HTTP server for one detector: each request brings an image, and images that arrive together share a forward pass.

A request is checked and read in the event loop, decoded in a small pool of threads, and computed in the thread of
:class:`~detr_bf.serving.batching.Batcher`, the only one that calls the model. At most ``queue`` requests are in work,
and the images of at most two batches are decoded, so images need at most about ``queue * max_bytes + 2 * batch_size *
max_pixels * 3`` bytes.

:mod:`detr_bf.serving.http` needs FastAPI and uvicorn (``pip install 'detr_bf[serve]'``); only ``detr-bf serve`` imports
it.
"""
