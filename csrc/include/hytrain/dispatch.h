// Which instruction set runs the passes of adam.h, and the knobs of their memory access.
//
// The choice is made at first use: the value of HYTRAIN_CPU_ISA if set, else the best that this CPU
// has. All choices give bitwise the same results; only speed differs.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "hytrain/adam.h"

namespace hytrain {

// Names of the instruction sets that this build holds and this CPU can run, best first.
std::vector<std::string> available_isas();

// Name of the instruction set in use. Throws std::invalid_argument, naming the choices, if
// HYTRAIN_CPU_ISA names one that does not exist or cannot run here.
std::string active_isa();

// Chooses an instruction set by name for the whole process; throws as active_isa does. Not to be
// called while a pass runs.
void set_isa(const std::string& name);

// Path of the OpenMP runtime that the passes call. Beside torch it is torch's own: the symbols of
// whichever libgomp was loaded first win, so a second team of threads never exists.
std::string openmp_library();

// How the passes walk through memory. No field changes a result. Defaults were chosen by
// measurement (csrc/README.md); set_tuning exists for `hytrain bench kernel --variants`.
struct Tuning {
    std::size_t prefetch_elements = 512;  // software prefetch distance; 0 is none
    std::size_t block_elements = 65536;   // most that a thread takes at a time; a multiple of 64
    bool dynamic_schedule = true;         // blocks go to whichever thread is free
};

Tuning tuning();
void set_tuning(const Tuning& tuning);  // throws std::invalid_argument; not while a pass runs

// Reads and writes p, m and v of n elements, leaving every bit as it is (24 bytes an element with
// moments in fp32; exponents of blocks are left out): the memory traffic of an Adam step without
// its arithmetic, to compare against.
void read_write(float* p, const Moments& moments, std::size_t n, int num_threads);
inline void read_write(float* p, float* m, float* v, std::size_t n, int num_threads) {
    read_write(p, fp32_moments(m, v), n, num_threads);
}

}  // namespace hytrain
