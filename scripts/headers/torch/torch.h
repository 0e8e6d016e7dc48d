// fairseq's libnat computes edit distances of lists, and needs nothing of torch but its copy of pybind11.

#pragma once

#include <pybind11/stl.h>
