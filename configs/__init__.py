"""One recipe a file; installed as ``detr_bf.configs`` so that ``detr_bf.create_model`` finds them."""
