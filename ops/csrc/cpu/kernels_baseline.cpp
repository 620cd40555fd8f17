// The CPU kernels for any processor.
#include "batch_attention_kernel.h"
#include "dropout_kernel.h"
#include "ms_deform_attn_kernel.h"

namespace detr_bf::cpu {
const BatchAttentionKernels kBatchAttentionBaseline = {attend_any, attend_backward_any};
const DropoutKernels kDropoutBaseline = {dropout_add_any, relu_dropout_any, relu_dropout_backward_any};
const DeformableKernels kDeformableBaseline = {forward_any, backward_any};
}  // namespace detr_bf::cpu
