// The update worker's part of a trace. Without one, all of it is a test for a null pointer.
#include <stdexcept>
#include <thread>
#include <utility>

#include "hytrain/update_worker.h"

namespace hytrain {

namespace {

// Bytes of memory that a pass reads and writes per element (docs/internals.md).
std::size_t bytes_per_element(SpanKind kind, std::size_t weight, std::size_t moment,
                              std::size_t gradient, std::size_t weights) {
    const std::size_t state = weight + 2 * moment;
    switch (kind) {
        case SpanKind::kPreview:
            return state + gradient + weights;
        case SpanKind::kCommit:
            return 2 * state + gradient + weights;
        case SpanKind::kCommitThenPreview:
            return 2 * state + 2 * gradient + weights;
        case SpanKind::kPublish:
            return weight + weights;
        default:
            throw std::logic_error("not a pass");
    }
}

}  // namespace

void UpdateWorker::start_trace(std::size_t capacity, bool threads) {
    std::lock_guard<std::mutex> lock(mutex_);
    throw_if_failed();
    if (!ring_) ring_ = std::make_unique<SpanRing>(capacity);
    traces_threads_ = threads;
    trace_.store(ring_.get(), std::memory_order_release);
}

void UpdateWorker::wait_traced() {
    wait_all();
    // The worker polls the copies while it has nothing else to do.
    while (traced_copies_.load(std::memory_order_acquire) != 0) {
        if (stop_) return;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            throw_if_failed();  // a failed worker does not poll
        }
        std::this_thread::sleep_for(kTracePoll);
    }
}

void UpdateWorker::stop_trace() { trace_.store(nullptr, std::memory_order_release); }

void UpdateWorker::set_trace_step(std::int32_t step) {
    std::lock_guard<std::mutex> lock(mutex_);
    trace_step_ = step;
}

void UpdateWorker::set_trace_anchor(EventHandle anchor, std::int64_t at_ns) {
    // Without the lock the worker could still ask for a time since an event that the caller
    // destroys after this.
    std::lock_guard<std::mutex> lock(anchor_mutex_);
    anchor_ = anchor;
    anchor_ns_ = at_ns;
}

std::uint64_t UpdateWorker::take_trace(std::vector<Span>& spans) {
    std::lock_guard<std::mutex> lock(mutex_);  // one reader at a time
    return ring_ ? ring_->take(spans) : 0;
}

void UpdateWorker::trace_pass(SpanRing& trace, SpanKind kind, const Chunk& chunk, bool sends,
                              std::int64_t begin_ns, std::int64_t end_ns) {
    const Layer& layer = layers_[static_cast<std::size_t>(place_.layer)];
    Span span;
    span.kind = kind;
    span.step = place_.step;
    span.layer = place_.layer;
    span.chunk = place_.chunk;
    span.elements = static_cast<std::int64_t>(chunk.n);
    span.bytes = static_cast<std::int64_t>(
        chunk.n * bytes_per_element(kind, layer.state.weight_bytes(),
                                    moment_bytes(layer.state.kind), size_of(gradient_dtype_),
                                    (sends ? size_of(chunk.weights_dtype) : 0) +
                                        (layer.state.split ? size_of(chunk.weights_dtype) : 0)));
    set_thread_times(nullptr);
    if (!traces_threads_) {
        span.begin_ns = begin_ns;
        span.end_ns = end_ns;
        trace.write(span);
        return;
    }
    std::int64_t parts = 0;
    for (const ThreadTime& time : thread_times_) parts += time.begin_ns != 0;
    if (parts == 0) return;
    // Blocks go to whichever thread is free: all threads are taken to have equal parts.
    span.elements /= parts;
    span.bytes /= parts;
    for (std::size_t i = 0; i < thread_times_.size(); ++i) {
        const ThreadTime& time = thread_times_[i];
        if (time.begin_ns == 0) continue;
        span.thread = static_cast<std::uint16_t>(i);
        span.begin_ns = time.begin_ns;
        span.end_ns = time.end_ns;
        trace.write(span);
    }
}

void UpdateWorker::trace_copy(SpanKind kind, const Place& place, EventHandle begin, EventHandle end,
                              std::int64_t bytes, std::int32_t slot) {
    SpanRing* const trace = trace_.load(std::memory_order_acquire);
    if (trace == nullptr) return;
    Span span;
    span.kind = kind;
    span.step = place.step;
    span.layer = place.layer;
    span.chunk = place.chunk;
    span.bytes = bytes;
    span.slot = slot;
    {
        std::lock_guard<std::mutex> lock(anchor_mutex_);
        // Checked again: the trace may have been stopped meanwhile, and the anchor destroyed.
        if (trace_.load(std::memory_order_acquire) == nullptr) return;
        span.begin_ns = device_->completed_ns(begin, anchor_, anchor_ns_);
        span.end_ns = device_->completed_ns(end, anchor_, anchor_ns_);
    }
    trace->write(span);
}

// Traces the copies out of outgoing buffers that have completed. False if none is in flight.
bool UpdateWorker::trace_sent() {
    if (trace_.load(std::memory_order_acquire) == nullptr && traced_copies_ == 0) return false;
    bool flying = false;
    for (std::size_t buffer = 0; buffer < outgoing_sent_.size(); ++buffer) {
        if (outgoing_sent_[buffer].bytes == 0) continue;
        if (device_->is_complete(outgoing_.ends[buffer])) {
            account_sent(static_cast<int>(buffer));
        } else {
            flying = true;
        }
    }
    return flying;
}

}  // namespace hytrain
