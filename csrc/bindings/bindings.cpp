// hytrain._C: the only file that knows Python. Arguments are addresses and sizes; who calls has
// checked them (hytrain/optim/cpu_adam.py). The GIL is released while memory is swept.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>

#include "hytrain/adam.h"
#include "hytrain/dispatch.h"

namespace py = pybind11;

namespace {

using hytrain::AdamHyper;
using hytrain::DType;
using hytrain::GradientStep;
using hytrain::Outgoing;
using hytrain::Tuning;
using Address = std::uintptr_t;

template <class T>
T* pointer(Address address) {
    return reinterpret_cast<T*>(address);
}

// ---- adam ---------------------------------------------------------------------------------------

void bind_adam_types(py::module_& m) {
    py::enum_<DType>(m, "DType")
        .value("float32", DType::kFloat32)
        .value("bfloat16", DType::kBFloat16)
        .value("float16", DType::kFloat16);
    py::class_<AdamHyper>(m, "AdamHyper")
        .def(py::init([](double lr, double beta1, double beta2, double eps, double weight_decay,
                         std::int64_t step, bool decoupled_decay, bool bias_correction) {
                 return AdamHyper{lr,           beta1, beta2,           eps,
                                  weight_decay, step,  decoupled_decay, bias_correction};
             }),
             py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
             py::arg("weight_decay"), py::arg("step"), py::arg("decoupled_decay"),
             py::arg("bias_correction"));
    py::class_<GradientStep>(m, "GradientStep")
        .def(py::init([](Address gradient, DType dtype, float scale, const AdamHyper& hyper) {
                 return GradientStep{pointer<const void>(gradient), dtype, scale, hyper};
             }),
             py::arg("gradient"), py::arg("dtype"), py::arg("scale"), py::arg("hyper"));
    py::class_<Outgoing>(m, "Outgoing")
        .def(py::init([](Address data, DType dtype, bool non_temporal) {
                 return Outgoing{pointer<void>(data), dtype, non_temporal};
             }),
             py::arg("data"), py::arg("dtype"), py::arg("non_temporal"));
}

void bind_adam_passes(py::module_& m) {
    using NoGil = py::call_guard<py::gil_scoped_release>;
    m.def(
        "commit",
        [](Address p, Address m_, Address v, std::size_t n, const GradientStep& step,
           const Outgoing& out, int num_threads) {
            hytrain::adam_commit(pointer<float>(p), pointer<float>(m_), pointer<float>(v), n, step,
                                 out, num_threads);
        },
        py::arg("p"), py::arg("m"), py::arg("v"), py::arg("n"), py::arg("step"), py::arg("out"),
        py::arg("num_threads"), NoGil());
    m.def(
        "preview",
        [](Address p, Address m_, Address v, std::size_t n, const GradientStep& step,
           const Outgoing& out, int num_threads) {
            hytrain::adam_preview(pointer<const float>(p), pointer<const float>(m_),
                                  pointer<const float>(v), n, step, out, num_threads);
        },
        py::arg("p"), py::arg("m"), py::arg("v"), py::arg("n"), py::arg("step"), py::arg("out"),
        py::arg("num_threads"), NoGil());
    m.def(
        "commit_then_preview",
        [](Address p, Address m_, Address v, std::size_t n, const GradientStep& previous,
           const GradientStep& current, const Outgoing& out, int num_threads) {
            hytrain::adam_commit_then_preview(pointer<float>(p), pointer<float>(m_),
                                              pointer<float>(v), n, previous, current, out,
                                              num_threads);
        },
        py::arg("p"), py::arg("m"), py::arg("v"), py::arg("n"), py::arg("previous"),
        py::arg("current"), py::arg("out"), py::arg("num_threads"), NoGil());
    m.def(
        "publish",
        [](Address p, std::size_t n, const Outgoing& out, int num_threads) {
            hytrain::adam_publish(pointer<const float>(p), n, out, num_threads);
        },
        py::arg("p"), py::arg("n"), py::arg("out"), py::arg("num_threads"), NoGil());
    m.def(
        "sum_of_squares",
        [](Address data, DType dtype, std::size_t n, int num_threads) {
            return hytrain::sum_of_squares(pointer<const void>(data), dtype, n, num_threads);
        },
        py::arg("data"), py::arg("dtype"), py::arg("n"), py::arg("num_threads"), NoGil());
    m.def(
        "read_write",
        [](Address p, Address m_, Address v, std::size_t n, int num_threads) {
            hytrain::read_write(pointer<float>(p), pointer<float>(m_), pointer<float>(v), n,
                                num_threads);
        },
        py::arg("p"), py::arg("m"), py::arg("v"), py::arg("n"), py::arg("num_threads"), NoGil());
}

void bind_dispatch(py::module_& m) {
    m.def("available_isas", &hytrain::available_isas);
    m.def("active_isa", &hytrain::active_isa);
    m.def("set_isa", &hytrain::set_isa, py::arg("name"));
    py::class_<Tuning>(m, "Tuning")
        .def(py::init([](std::size_t prefetch_elements, std::size_t block_elements,
                         bool dynamic_schedule) {
                 return Tuning{prefetch_elements, block_elements, dynamic_schedule};
             }),
             py::arg("prefetch_elements"), py::arg("block_elements"), py::arg("dynamic_schedule"))
        .def_readonly("prefetch_elements", &Tuning::prefetch_elements)
        .def_readonly("block_elements", &Tuning::block_elements)
        .def_readonly("dynamic_schedule", &Tuning::dynamic_schedule);
    m.def("tuning", &hytrain::tuning);
    m.def("set_tuning", &hytrain::set_tuning, py::arg("tuning"));
}

void bind_adam(py::module_& m) {
    bind_adam_types(m);
    bind_adam_passes(m);
    bind_dispatch(m);
}

}  // namespace

// ---- module -------------------------------------------------------------------------------------

PYBIND11_MODULE(_C, m) {
    m.doc() = "Kernels of hytrain on addresses and sizes; hytrain.optim.cpu_adam checks them.";
    bind_adam(m);
}
