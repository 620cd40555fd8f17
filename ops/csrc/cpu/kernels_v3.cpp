// The CPU kernels for x86-64-v3.
#include "batch_attention_kernel.h"
#include "dropout_kernel.h"
#include "ms_deform_attn_kernel.h"

namespace detr_bf::cpu {
const BatchAttentionKernels kBatchAttentionV3 = {attend_any, attend_backward_any};
const DropoutKernels kDropoutV3 = {dropout_add_any, relu_dropout_any, relu_dropout_backward_any};
const DeformableKernels kDeformableV3 = {forward_any, backward_any};
}  // namespace detr_bf::cpu
