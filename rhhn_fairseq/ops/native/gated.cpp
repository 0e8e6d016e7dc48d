// Steps of LSTM, LN LSTM, HyperLSTM and LN HyperLSTM, and complete sequences of the first two.

#include "gated.h"
#include "rows.h"

#define RHHN_EXPORT_DIRECTION(NAME, TYPE, HYPER, BACKWARD)                                     \
    extern "C" void NAME(const rhhn::Gated* p, int64_t t) {                                    \
        const rhhn::GatedStep<TYPE, HYPER> step(*p, t);                                        \
        rhhn::over_rows<rhhn::GatedStep<TYPE, HYPER>, BACKWARD>(step, *p);                     \
    }
#define RHHN_EXPORT(NAME, TYPE)                                        \
    RHHN_EXPORT_DIRECTION(lstm_forward_##NAME, TYPE, false, false)       \
    RHHN_EXPORT_DIRECTION(lstm_backward_##NAME, TYPE, false, true)       \
    RHHN_EXPORT_DIRECTION(hyper_lstm_forward_##NAME, TYPE, true, false)  \
    RHHN_EXPORT_DIRECTION(hyper_lstm_backward_##NAME, TYPE, true, true)

RHHN_EXPORT(float32, float)
RHHN_EXPORT(float64, double)
RHHN_EXPORT(bfloat16, rhhn::bfloat16)

// Only for float32, where operands and states have one type.
extern "C" void lstm_sequence_forward(const rhhn::Gated* p, const rhhn::Recurrence* r) {
    rhhn::run_sequence<rhhn::GatedStep<float, false>, false>(*p, *r);
}
extern "C" void lstm_sequence_backward(const rhhn::Gated* p, const rhhn::Recurrence* r) {
    rhhn::run_sequence<rhhn::GatedStep<float, false>, true>(*p, *r);
}

extern "C" int64_t size_of_gated() { return sizeof(rhhn::Gated); }
extern "C" int64_t size_of_recurrence() { return sizeof(rhhn::Recurrence); }
