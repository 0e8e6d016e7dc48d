// What fairseq's extensions use of torch, in place of torch's own <torch/extension.h>, which also declares
// neural networks, optimisers and every operation, and takes twice as long to compile.

#pragma once

#include <ATen/Dispatch.h>
#include <ATen/TensorIndexing.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/gt.h>
#include <ATen/ops/max.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/topk.h>
#include <torch/csrc/utils/pybind.h>

namespace torch {
using namespace at;
}
