// Steps of LSTM, LN LSTM, HyperLSTM and LN HyperLSTM, and complete sequences of the first two.

#include "gated.h"
#include "rows.h"

namespace rhhn {
template <typename T>
using LstmStep = GatedStep<T, false>;
template <typename T>
using HyperLstmStep = GatedStep<T, true>;
}  // namespace rhhn

RHHN_EXPORT_STEP(lstm, LstmStep, Gated)
RHHN_EXPORT_STEP(hyper_lstm, HyperLstmStep, Gated)

// Only for float32, where operands and states have one type.
extern "C" void lstm_sequence_forward(const rhhn::Gated* p, const rhhn::Recurrence* r) {
    rhhn::run_sequence<rhhn::LstmStep<float>, false>(*p, *r);
}
extern "C" void lstm_sequence_backward(const rhhn::Gated* p, const rhhn::Recurrence* r) {
    rhhn::run_sequence<rhhn::LstmStep<float>, true>(*p, *r);
}

extern "C" int64_t size_of_gated() { return sizeof(rhhn::Gated); }
extern "C" int64_t size_of_recurrence() { return sizeof(rhhn::Recurrence); }
