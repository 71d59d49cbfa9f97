// hytrain._C: the only file that knows Python. Arguments are addresses and sizes, which the caller
// has checked (hytrain/kernels/cpu_adam.py). The GIL is released while memory is swept.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "hytrain/adam.h"
#include "hytrain/crc32.h"
#include "hytrain/device.h"
#include "hytrain/dispatch.h"
#include "hytrain/parallel_copy.h"
#include "hytrain/summed_file.h"
#include "hytrain/update_worker.h"

namespace py = pybind11;

void bind_modules(py::module_& m);  // same_modules.cpp

namespace {

using hytrain::AdamHyper;
using hytrain::DType;
using hytrain::GradientStep;
using hytrain::MomentKind;
using hytrain::MomentRun;
using hytrain::Moments;
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
        .value("float16", DType::kFloat16)
        .value("bfloat16_away", DType::kBFloat16Away);
    py::enum_<MomentKind>(m, "MomentKind")
        .value("float32", MomentKind::kFloat32)
        .value("bfloat16", MomentKind::kBFloat16)
        .value("eight_bit", MomentKind::kEightBit);
    py::class_<MomentRun>(m, "MomentRun")
        .def(py::init([](std::size_t begin, std::uint64_t parameter, std::uint64_t first_index) {
                 return MomentRun{begin, parameter, first_index};
             }),
             py::arg("begin"), py::arg("parameter"), py::arg("first_index"));
    py::class_<Moments>(m, "Moments")
        .def(py::init([](MomentKind kind, Address m_, Address v, Address m_exponents,
                         Address v_exponents, std::uint64_t seed, std::vector<MomentRun> runs) {
                 return Moments{kind,
                                pointer<void>(m_),
                                pointer<void>(v),
                                pointer<std::uint8_t>(m_exponents),
                                pointer<std::uint8_t>(v_exponents),
                                seed,
                                std::move(runs)};
             }),
             py::arg("kind"), py::arg("m"), py::arg("v"), py::arg("m_exponents") = 0,
             py::arg("v_exponents") = 0, py::arg("seed") = 0,
             py::arg("runs") = std::vector<MomentRun>());
    m.attr("moment_block") = hytrain::kMomentBlock;
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
        [](Address p, const Moments& moments, std::size_t n, const GradientStep& step,
           const Outgoing& out, int num_threads) {
            hytrain::adam_commit(pointer<float>(p), moments, n, step, out, num_threads);
        },
        py::arg("p"), py::arg("moments"), py::arg("n"), py::arg("step"), py::arg("out"),
        py::arg("num_threads"), NoGil());
    m.def(
        "commit_split",
        [](Address copy, Address remainder, const Moments& moments, std::size_t n,
           const GradientStep& step, int num_threads) {
            const hytrain::SplitWeights weights{pointer<void>(copy),
                                                pointer<std::uint16_t>(remainder)};
            hytrain::adam_commit(weights, moments, n, step, num_threads);
        },
        py::arg("copy"), py::arg("remainder"), py::arg("moments"), py::arg("n"), py::arg("step"),
        py::arg("num_threads"), NoGil());
    m.def(
        "preview",
        [](Address p, const Moments& moments, std::size_t n, const GradientStep& step,
           const Outgoing& out, int num_threads) {
            hytrain::adam_preview(pointer<const float>(p), moments, n, step, out, num_threads);
        },
        py::arg("p"), py::arg("moments"), py::arg("n"), py::arg("step"), py::arg("out"),
        py::arg("num_threads"), NoGil());
    m.def(
        "commit_then_preview",
        [](Address p, const Moments& moments, std::size_t n, const GradientStep& previous,
           const GradientStep& current, const Outgoing& out, int num_threads) {
            hytrain::adam_commit_then_preview(pointer<float>(p), moments, n, previous, current, out,
                                              num_threads);
        },
        py::arg("p"), py::arg("moments"), py::arg("n"), py::arg("previous"), py::arg("current"),
        py::arg("out"), py::arg("num_threads"), NoGil());
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
        [](Address p, const Moments& moments, std::size_t n, int num_threads) {
            hytrain::read_write(pointer<float>(p), moments, n, num_threads);
        },
        py::arg("p"), py::arg("moments"), py::arg("n"), py::arg("num_threads"), NoGil());
}

void bind_dispatch(py::module_& m) {
    m.def("available_isas", &hytrain::available_isas);
    m.def("active_isa", &hytrain::active_isa);
    m.def("set_isa", &hytrain::set_isa, py::arg("name"));
    m.def("openmp_library", &hytrain::openmp_library);
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

// ---- offload ------------------------------------------------------------------------------------

using hytrain::Chunk;
using hytrain::Job;
using hytrain::JobSpan;
using hytrain::Pass;
using hytrain::Span;
using hytrain::SpanKind;
using hytrain::StateArrays;
using hytrain::StepRecord;
using hytrain::UpdateWorker;
using hytrain::WorkerStatistics;

void bind_offload_types(py::module_& m) {
    py::enum_<Pass>(m, "Pass")
        .value("update", Pass::kUpdate)
        .value("direct", Pass::kDirect)
        .value("late", Pass::kLate)
        .value("preview", Pass::kPreview)
        .value("commit", Pass::kCommit)
        .value("settle", Pass::kSettle)
        .value("publish", Pass::kPublish)
        .value("drop", Pass::kDrop)
        .value("withdraw", Pass::kWithdraw)
        .value("leave", Pass::kLeave)
        .value("arrive", Pass::kArrive)
        .value("capture", Pass::kCapture);
    py::class_<StateArrays>(m, "StateArrays")
        .def(py::init([](Address p, Address m_, Address v, MomentKind kind, Address m_exponents,
                         Address v_exponents, std::uint64_t seed, bool split) {
                 return StateArrays{pointer<void>(p),
                                    pointer<void>(m_),
                                    pointer<void>(v),
                                    kind,
                                    pointer<std::uint8_t>(m_exponents),
                                    pointer<std::uint8_t>(v_exponents),
                                    seed,
                                    split};
             }),
             py::arg("p") = 0, py::arg("m") = 0, py::arg("v") = 0,
             py::arg("kind") = MomentKind::kFloat32, py::arg("m_exponents") = 0,
             py::arg("v_exponents") = 0, py::arg("seed") = 0, py::arg("split") = false);
    py::class_<Chunk>(m, "Chunk")
        .def(py::init([](std::size_t n, std::size_t shard_offset, Address weights,
                         DType weights_dtype, int group, int slot_class, bool weights_on_host,
                         std::vector<MomentRun> runs) {
                 Chunk chunk;
                 chunk.n = n;
                 chunk.shard_offset = shard_offset;
                 chunk.weights = pointer<void>(weights);
                 chunk.weights_dtype = weights_dtype;
                 chunk.group = group;
                 chunk.slot_class = slot_class;
                 chunk.weights_on_host = weights_on_host;
                 chunk.runs = std::move(runs);
                 return chunk;
             }),
             py::kw_only(), py::arg("n"), py::arg("shard_offset"), py::arg("weights"),
             py::arg("weights_dtype"), py::arg("group"), py::arg("slot_class"),
             py::arg("weights_on_host") = false, py::arg("runs") = std::vector<MomentRun>());
    py::class_<StepRecord>(m, "StepRecord")
        .def(py::init([](float scale, std::vector<AdamHyper> hyper) {
                 return StepRecord{scale, std::move(hyper)};
             }),
             py::arg("scale"), py::arg("hyper"))
        .def("__eq__", &StepRecord::operator==);
    py::class_<JobSpan>(m, "JobSpan")
        .def_readonly("layer", &JobSpan::layer)
        .def_property_readonly("job_pass",
                               [](const JobSpan& span) { return static_cast<Pass>(span.pass); })
        .def_readonly("begin_ns", &JobSpan::begin_ns)
        .def_readonly("end_ns", &JobSpan::end_ns)
        .def_readonly("kernel_ns", &JobSpan::kernel_ns)
        .def_readonly("wait_gradient_ns", &JobSpan::wait_gradient_ns)
        .def_readonly("final", &JobSpan::final)
        .def_readonly("committed", &JobSpan::committed);
    py::class_<WorkerStatistics>(m, "WorkerStatistics")
        .def_readonly("kernel_ns", &WorkerStatistics::kernel_ns)
        .def_readonly("wait_gradient_ns", &WorkerStatistics::wait_gradient_ns)
        .def_readonly("wait_outgoing_ns", &WorkerStatistics::wait_outgoing_ns)
        .def_readonly("issue_ns", &WorkerStatistics::issue_ns)
        .def_readonly("elements", &WorkerStatistics::elements)
        .def_readonly("jobs", &WorkerStatistics::jobs)
        .def_readonly("to_host_ns", &WorkerStatistics::to_host_ns)
        .def_readonly("to_host_bytes", &WorkerStatistics::to_host_bytes)
        .def_readonly("to_device_ns", &WorkerStatistics::to_device_ns)
        .def_readonly("to_device_bytes", &WorkerStatistics::to_device_bytes);
}

void bind_trace_types(py::module_& m) {
    py::enum_<SpanKind>(m, "SpanKind")
        .value("preview", SpanKind::kPreview)
        .value("commit", SpanKind::kCommit)
        .value("commit_then_preview", SpanKind::kCommitThenPreview)
        .value("publish", SpanKind::kPublish)
        .value("gradient_to_host", SpanKind::kGradientToHost)
        .value("gradient_to_device", SpanKind::kGradientToDevice)
        .value("weights_to_device", SpanKind::kWeightsToDevice)
        .value("state_to_host", SpanKind::kStateToHost)
        .value("state_to_device", SpanKind::kStateToDevice)
        .value("weights_to_host", SpanKind::kWeightsToHost);
    py::class_<Span>(m, "TraceSpan")
        .def_readonly("kind", &Span::kind)
        .def_readonly("thread", &Span::thread)
        .def_readonly("layer", &Span::layer)
        .def_readonly("chunk", &Span::chunk)
        .def_readonly("step", &Span::step)
        .def_readonly("begin_ns", &Span::begin_ns)
        .def_readonly("end_ns", &Span::end_ns)
        .def_readonly("bytes", &Span::bytes)
        .def_readonly("elements", &Span::elements)
        .def_readonly("slot", &Span::slot);
}

// The spans since the last call, and how many more were overwritten.
std::pair<std::vector<Span>, std::uint64_t> take_trace(UpdateWorker& worker) {
    std::vector<Span> spans;
    const std::uint64_t lost = worker.take_trace(spans);
    return {std::move(spans), lost};
}

void submit_update(UpdateWorker& worker, int layer, Address gradient, Address gradient_ready,
                   Address sum_of_squares, const StepRecord& record, bool direct) {
    Job job;
    job.pass = direct ? Pass::kDirect : Pass::kUpdate;
    job.layer = layer;
    job.gradient = pointer<const char>(gradient);
    job.gradient_ready = gradient_ready;
    job.sum_of_squares = pointer<const void>(sum_of_squares);
    job.record = record;
    worker.submit(std::move(job));
}

void submit_pass(UpdateWorker& worker, int layer, Pass pass, Address withdraw_to,
                 Address withdraw_ready) {
    Job job;
    job.pass = pass;
    job.layer = layer;
    job.withdraw_to = pointer<char>(withdraw_to);
    job.gradient_ready = withdraw_ready;
    worker.submit(std::move(job));
}

void submit_leave(UpdateWorker& worker, int layer, const StateArrays& device, Address ready,
                  Address moved) {
    Job job;
    job.pass = Pass::kLeave;
    job.layer = layer;
    job.device_state = device;
    job.gradient_ready = ready;
    job.moved = moved;
    worker.submit_move(std::move(job));
}

void submit_arrive(UpdateWorker& worker, int layer, const StateArrays& host,
                   const StateArrays& device, Address ready) {
    Job job;
    job.pass = Pass::kArrive;
    job.layer = layer;
    job.host_state = host;
    job.device_state = device;
    job.gradient_ready = ready;
    worker.submit_move(std::move(job));
}

// A forked child has the worker but none of its threads, and maybe a mutex that one of them held:
// destroying the worker there could wait for ever. The child's copy is leaked.
struct DeleteInOwnProcess {
    void operator()(UpdateWorker* worker) const {
        if (worker->in_own_process()) delete worker;
    }
};
using WorkerHolder = std::unique_ptr<UpdateWorker, DeleteInOwnProcess>;

void bind_worker(py::module_& m) {
    using NoGil = py::call_guard<py::gil_scoped_release>;
    py::class_<UpdateWorker, WorkerHolder>(m, "UpdateWorker")
        .def_static(
            "on_host",
            [](int num_threads, std::uint64_t seed, unsigned max_delay_us) {
                return WorkerHolder(new UpdateWorker(hytrain::make_host_device(seed, max_delay_us),
                                                     num_threads, seed, max_delay_us));
            },
            py::arg("num_threads"), py::arg("delay_seed"), py::arg("max_delay_us"))
        .def_static(
            "on_cuda",
            [](int ordinal, Address to_host, Address to_device, int num_threads, std::uint64_t seed,
               unsigned max_delay_us) {
                return WorkerHolder(
                    new UpdateWorker(hytrain::make_cuda_device(ordinal, to_host, to_device),
                                     num_threads, seed, max_delay_us));
            },
            py::arg("ordinal"), py::arg("to_host"), py::arg("to_device"), py::arg("num_threads"),
            py::arg("delay_seed"), py::arg("max_delay_us"))
        .def(
            "add_slot_class",
            [](UpdateWorker& worker, std::size_t slot_bytes) {
                return worker.add_slot_class(slot_bytes);
            },
            py::arg("slot_bytes"))
        .def_property_readonly_static("outgoing",
                                      [](const py::object&) { return UpdateWorker::kOutgoing; })
        .def(
            "add_slots",
            [](UpdateWorker& worker, int slot_class, Address base, std::size_t slot_bytes,
               int count) { worker.add_slots(slot_class, pointer<char>(base), slot_bytes, count); },
            py::arg("slot_class"), py::arg("base"), py::arg("slot_bytes"), py::arg("count"))
        .def(
            "retire_slots",
            [](UpdateWorker& worker, int slot_class, Address base, std::size_t num_bytes) {
                worker.retire_slots(slot_class, pointer<char>(base), num_bytes);
            },
            py::arg("slot_class"), py::arg("base"), py::arg("num_bytes"))
        .def(
            "is_retiring",
            [](UpdateWorker& worker, Address base) {
                return worker.is_retiring(pointer<char>(base));
            },
            py::arg("base"))
        .def(
            "add_layer",
            [](UpdateWorker& worker, std::string name, DType gradient_dtype, Address ready,
               Address norm_slot, const StateArrays& state, std::vector<Chunk> chunks) {
                return worker.add_layer(std::move(name), gradient_dtype, ready,
                                        pointer<double>(norm_slot), state, std::move(chunks));
            },
            py::arg("name"), py::arg("gradient_dtype"), py::arg("ready"), py::arg("norm_slot"),
            py::arg("state"), py::arg("chunks"))
        .def(
            "move_weights",
            [](UpdateWorker& worker, int layer, const std::vector<Address>& addresses) {
                std::vector<void*> chunks;
                for (Address address : addresses) chunks.push_back(pointer<void>(address));
                worker.move_weights(layer, chunks);
            },
            py::arg("layer"), py::arg("addresses"), NoGil())
        .def("start", &UpdateWorker::start)
        .def("close", &UpdateWorker::close, NoGil())
        .def("begin_step", &UpdateWorker::begin_step, py::arg("sum_of_squares_limit"), NoGil())
        .def("submit_update", &submit_update, py::arg("layer"), py::arg("gradient"),
             py::arg("gradient_ready"), py::arg("sum_of_squares"), py::arg("record"),
             py::arg("direct"), NoGil())
        .def("submit", &submit_pass, py::arg("layer"), py::arg("job_pass"),
             py::arg("withdraw_to") = 0, py::arg("withdraw_ready") = 0, NoGil())
        .def("submit_leave", &submit_leave, py::arg("layer"), py::arg("device"), py::arg("ready"),
             py::arg("moved"), NoGil())
        .def("submit_arrive", &submit_arrive, py::arg("layer"), py::arg("host"), py::arg("device"),
             py::arg("ready"), NoGil())
        .def("wait_moved", &UpdateWorker::wait_moved, py::arg("layer"), NoGil())
        .def("is_moving", &UpdateWorker::is_moving, py::arg("layer"), NoGil())
        .def("cancel_update", &UpdateWorker::cancel_update, py::arg("layer"), NoGil())
        .def("finalize", &UpdateWorker::finalize, py::arg("record"), NoGil())
        .def("wait_issued", &UpdateWorker::wait_issued, py::arg("layer"), NoGil())
        .def("wait_complete", &UpdateWorker::wait_complete, py::arg("layer"), NoGil())
        .def("wait_all", &UpdateWorker::wait_all, NoGil())
        .def("wait_fetched", &UpdateWorker::wait_fetched, py::arg("layers"), NoGil())
        .def("is_fetched", &UpdateWorker::is_fetched, py::arg("layer"), NoGil())
        .def("has_pending", &UpdateWorker::has_pending, py::arg("layer"), NoGil())
        .def("wait_settled", &UpdateWorker::wait_settled, py::arg("layer"), NoGil())
        .def("capture", &UpdateWorker::capture, py::arg("layer"), py::arg("target"), NoGil())
        .def("wait_captured", &UpdateWorker::wait_captured, py::arg("layer"), NoGil())
        .def("forget_capture", &UpdateWorker::forget_capture, py::arg("layer"), NoGil())
        .def("check_error", &UpdateWorker::check_error, NoGil())
        .def(
            "on_stall",
            [](UpdateWorker& worker, double after_seconds, py::function report) {
                // The waiting thread has released the GIL for its wait.
                worker.on_stall(
                    std::chrono::milliseconds(static_cast<std::int64_t>(1000.0 * after_seconds)),
                    [report = std::move(report)](const std::string& text) {
                        py::gil_scoped_acquire locked;
                        report(text);
                    });
            },
            py::arg("after_seconds"), py::arg("report"))
        .def("take_statistics", &UpdateWorker::take_statistics, NoGil())
        .def("take_spans", &UpdateWorker::take_spans, NoGil())
        .def("set_num_threads", &UpdateWorker::set_num_threads, py::arg("num_threads"))
        .def("start_trace", &UpdateWorker::start_trace, py::arg("capacity"), py::arg("threads"),
             NoGil())
        .def("wait_traced", &UpdateWorker::wait_traced, NoGil())
        .def("stop_trace", &UpdateWorker::stop_trace)
        .def("set_trace_step", &UpdateWorker::set_trace_step, py::arg("step"), NoGil())
        .def("set_trace_anchor", &UpdateWorker::set_trace_anchor, py::arg("anchor"),
             py::arg("at_ns"), NoGil())
        .def("take_trace", &take_trace, NoGil())
        .def("fail_at", &UpdateWorker::fail_at, py::arg("layer"));
}

void bind_offload(py::module_& m) {
    m.def(
        "touch",
        [](Address memory, std::size_t bytes, int num_threads) {
            hytrain::parallel_touch(pointer<void>(memory), bytes, num_threads);
        },
        py::arg("memory"), py::arg("bytes"), py::arg("num_threads"),
        py::call_guard<py::gil_scoped_release>());
    bind_offload_types(m);
    bind_trace_types(m);
    bind_worker(m);
}

// ---- checkpoint ---------------------------------------------------------------------------------

// Calls a function without the GIL; a file's errors become OSError with their errno.
template <class Call>
auto without_gil(Call call) {
    try {
        py::gil_scoped_release released;
        return call();
    } catch (const std::system_error& error) {
        errno = error.code().value();
        PyErr_SetFromErrno(PyExc_OSError);
        throw py::error_already_set();
    }
}

void bind_checkpoint(py::module_& m) {
    using hytrain::SummedFile;
    m.def(
        "crc32",
        [](std::uint32_t sum, Address data, std::size_t bytes) {
            return hytrain::crc32(sum, pointer<void>(data), bytes);
        },
        py::arg("sum"), py::arg("data"), py::arg("bytes"),
        py::call_guard<py::gil_scoped_release>());
    m.def("trim_write_buffers", &hytrain::WriteBuffer::trim);
    py::class_<SummedFile>(m, "SummedFile")
        .def(py::init<int>(), py::arg("descriptor"))
        .def(
            "write",
            [](SummedFile& file, Address data, std::size_t bytes) {
                // Reacquiring the GIL may take milliseconds while other Python code runs; copying a
                // record's header is faster.
                constexpr std::size_t kFew = 16384;
                if (bytes < kFew && file.stays(bytes)) {
                    return file.write(pointer<void>(data), bytes);
                }
                return without_gil([&] { return file.write(pointer<void>(data), bytes); });
            },
            py::arg("data"), py::arg("bytes"))
        .def("flush", [](SummedFile& file) { without_gil([&] { file.flush(); }); })
        .def_property_readonly("num_bytes", &SummedFile::num_bytes)
        .def("sums", &SummedFile::sums);
}

}  // namespace

// ---- module -------------------------------------------------------------------------------------

// Any call of the worker can throw WorkerError: it is mapped to its Python type in one place.
void translate_worker_error(std::exception_ptr thrown) {
    try {
        if (thrown) std::rethrow_exception(thrown);
    } catch (const hytrain::WorkerError& error) {
        py::set_error(py::module_::import("hytrain.errors").attr("WorkerError"), error.what());
    }
}

PYBIND11_MODULE(_C, m) {
    m.doc() = "Kernels of hytrain on addresses and sizes; hytrain.kernels.cpu_adam checks them.";
    py::register_local_exception_translator(&translate_worker_error);
    bind_adam(m);
    bind_offload(m);
    bind_checkpoint(m);
    bind_modules(m);
}
