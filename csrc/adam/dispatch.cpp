// Chooses the instruction set (hytrain/dispatch.h).
#include "hytrain/dispatch.h"

#include <dlfcn.h>
#include <omp.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "kernel_table.h"

namespace hytrain {
namespace {

// Best first. __builtin_cpu_supports asks CPUID and, through XGETBV, whether the operating system
// saves the registers.
std::vector<const KernelTable*> runnable() {
    std::vector<const KernelTable*> tables;
#if defined(HYTRAIN_X86_KERNELS)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("fma") != 0 &&
                      __builtin_cpu_supports("f16c") != 0;
    if (avx2 && __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
        __builtin_cpu_supports("avx512vl") != 0 && __builtin_cpu_supports("avx512dq") != 0) {
        tables.push_back(&kAvx512Kernels);
    }
    if (avx2) {
        tables.push_back(&kAvx2Kernels);
    }
#elif defined(HYTRAIN_ARM_KERNELS)
    tables.push_back(&kNeonKernels);
#endif
    tables.push_back(&kScalarKernels);
    return tables;
}

const KernelTable* find(const std::string& name, const std::string& asked_by) {
    std::string choices;
    for (const KernelTable* table : runnable()) {
        if (name == table->name) {
            return table;
        }
        choices += (choices.empty() ? "" : ", ") + std::string(table->name);
    }
    throw std::invalid_argument(asked_by + " asks for the instruction set \"" + name +
                                "\", but this build on this CPU has only: " + choices +
                                ". Choose one of these, or leave it out to get the best.");
}

std::atomic<const KernelTable*> g_active{nullptr};

}  // namespace

const KernelTable& active_kernels() {
    const KernelTable* table = g_active.load(std::memory_order_acquire);
    if (table == nullptr) {
        // Two threads may come here at once; both choose the same table.
        const char* forced = std::getenv("HYTRAIN_CPU_ISA");
        table = forced != nullptr && *forced != '\0' ? find(forced, "HYTRAIN_CPU_ISA")
                                                     : runnable().front();
        g_active.store(table, std::memory_order_release);
    }
    return *table;
}

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const KernelTable* table : runnable()) {
        names.emplace_back(table->name);
    }
    return names;
}

std::string active_isa() { return active_kernels().name; }

void set_isa(const std::string& name) {
    g_active.store(find(name, "set_isa"), std::memory_order_release);
}

std::string openmp_library() {
    Dl_info info{};
    const bool known = dladdr(reinterpret_cast<void*>(&omp_get_num_threads), &info) != 0;
    return known && info.dli_fname != nullptr ? info.dli_fname : "";
}

}  // namespace hytrain
