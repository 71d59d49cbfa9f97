// The update worker's thread: pick a job, fetch its gradient, run its pass, send the result.
#include <chrono>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <utility>

#include "hytrain/update_worker.h"

namespace hytrain {

namespace {

// Fetches are issued this many chunks ahead: enough to hide a copy behind the kernel. Further ahead
// would fix the order of the layers too early (with direct commit all slots are free).
constexpr std::size_t kMaxActive = 8;
constexpr std::size_t kMaxSpans = 1U << 16U;

std::int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

bool fetches(Pass pass) { return pass == Pass::kUpdate || pass == Pass::kDirect; }

}  // namespace

void UpdateWorker::run() {
    const Layer* layer = nullptr;
    try {
        device_->attach_thread();
        for (;;) {
            if (active_.empty() && !fetching_) {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return stop_ || has_job(); });
            }
            if (stop_) return;
            while (issue_next()) {
            }
            if (active_.empty()) continue;
            const Work work = active_.front();
            active_.pop_front();
            layer = &layers_[static_cast<std::size_t>(work.job->layer)];
            process(work);
        }
    } catch (const std::exception& error) {
        fail(std::string("the update worker failed") +
             (layer != nullptr ? " at layer '" + layer->name + "'" : std::string()) + ": " +
             error.what());
    }
}

// Under mutex_.
bool UpdateWorker::has_job() {
    for (const auto& job : jobs_) {
        if (!job->picked) return true;
    }
    return false;
}

void UpdateWorker::fail(const std::string& message) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (error_.empty()) error_ = message;
    }
    changed_.notify_all();
}

bool UpdateWorker::is_ready(const Job& job) {
    return !fetches(job.pass) || job.cancelled || device_->is_complete(job.gradient_ready);
}

// The lowest layer whose gradient is there. The next forward needs the low layers first, and while
// it climbs from there the worker still has the last layers to do, whose gradients came first: in
// order of arrival they would be done early, and the worker would stand still from its last low
// layer until the next step's first gradient. If none is there, the oldest will be the next.
std::shared_ptr<Job> UpdateWorker::pick_job() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::shared_ptr<Job> oldest;
    std::shared_ptr<Job> first;
    for (const auto& job : jobs_) {
        if (job->picked) continue;
        if (!oldest) oldest = job;
        // Jobs of one layer keep their order: jobs_ is sorted by sequence.
        if ((!first || job->layer < first->layer) && is_ready(*job)) first = job;
    }
    std::shared_ptr<Job> picked = first ? first : oldest;
    if (picked) picked->picked = true;
    return picked;
}

// Queues the next chunk's copy to the host, if a slot is free. False: nothing more to issue now.
bool UpdateWorker::issue_next() {
    if (active_.size() >= kMaxActive) return false;
    if (!fetching_) {
        fetching_ = pick_job();
        fetching_chunk_ = 0;
        if (!fetching_) return false;
    }
    const Job& job = *fetching_;
    const Layer& layer = layers_[static_cast<std::size_t>(job.layer)];
    const Chunk& chunk = layer.chunks[fetching_chunk_];
    Work work;
    work.job = fetching_;
    work.chunk = fetching_chunk_;
    work.last = fetching_chunk_ + 1 == layer.chunks.size();
    if (fetches(job.pass)) {
        SlotClass& slots = slots_[static_cast<std::size_t>(chunk.slot_class)];
        if (slots.free.empty()) return false;
        work.slot = slots.free.back();
        slots.free.pop_back();
        delay();
        const std::int64_t begin = now_ns();
        if (fetching_chunk_ == 0) {
            // The gradient must be final before it is copied.
            device_->lane_wait(Lane::kToHost, job.gradient_ready);
            if (job.sum_of_squares != nullptr) {
                device_->copy(Lane::kToHost, layer.norm_slot, job.sum_of_squares, sizeof(double));
            }
        }
        const std::size_t size = size_of(layer.gradient_dtype);
        device_->copy(Lane::kToHost, slots.address(work.slot),
                      job.gradient + chunk.shard_offset * size, chunk.n * size);
        device_->record(slots.events[static_cast<std::size_t>(work.slot)], Lane::kToHost);
        job_statistics_.issue_ns += now_ns() - begin;
    }
    active_.push_back(std::move(work));
    ++fetching_chunk_;
    if (active_.back().last) fetching_.reset();
    return true;
}

void UpdateWorker::process(const Work& work) {
    Job& job = *work.job;
    Layer& layer = layers_[static_cast<std::size_t>(job.layer)];
    Chunk& chunk = layer.chunks[work.chunk];
    if (work.chunk == 0) span_ = JobSpan{job.layer, static_cast<int>(job.pass), now_ns(), 0, 0};
    if (work.slot >= 0) {
        SlotClass& slots = slots_[static_cast<std::size_t>(chunk.slot_class)];
        // The kernel must not read the slot before the copy into it has completed.
        job_statistics_.wait_gradient_ns +=
            wait_event(slots.events[static_cast<std::size_t>(work.slot)]);
    }
    delay();
    if (work.chunk == 0) begin_job(job, layer);
    if (job.cancelled) {
        slots_[static_cast<std::size_t>(chunk.slot_class)].free.push_back(work.slot);
    } else {
        run_pass(layer, chunk, work);
    }
    if (work.last) finish_job(work);
}

// Decides, in one critical section, what the job commits and previews: finalize() sees either a
// job that has not started (and amends it) or a layer whose record it can replace.
void UpdateWorker::begin_job(Job& job, Layer& layer) {
    if (fail_at_ == job.layer) throw std::runtime_error("injected fault");
    std::lock_guard<std::mutex> lock(mutex_);
    job.started = true;
    if (job.cancelled) return;
    previous_.reset();
    switch (job.pass) {
        case Pass::kUpdate:
            if (job.sum_of_squares != nullptr) running_sum_ += *layer.norm_slot;
            previous_ = std::move(layer.pending);
            current_ = job.record;
            layer.pending = job.record;
            layer.previewed = job.record;
            layer.tentative = !job.final;
            // Written so that a sum that is not a number holds as well.
            holding_ = !job.final && !(running_sum_ <= limit_);
            layer.held = holding_;
            break;
        case Pass::kDirect:
            current_ = job.record;
            break;
        case Pass::kPreview:
            if (!layer.pending) throw std::logic_error("preview of a layer with nothing pending");
            current_ = *layer.pending;
            layer.previewed = current_;
            break;
        case Pass::kCommit:
            previous_ = std::move(layer.pending);
            layer.pending.reset();
            break;
        case Pass::kDrop:
        case Pass::kWithdraw:
            layer.pending.reset();
            layer.tentative = false;
            layer.held = false;
            break;
        case Pass::kPublish:
            break;
    }
}

GradientStep UpdateWorker::gradient_step(const Layer& layer, const Chunk& chunk, int slot,
                                         const StepRecord& record) const {
    if (slot < 0) throw std::logic_error("a pending gradient has no slot");
    GradientStep step;
    step.gradient = slots_[static_cast<std::size_t>(chunk.slot_class)].address(slot);
    step.dtype = layer.gradient_dtype;
    step.scale = record.scale;
    step.hyper = record.hyper.at(static_cast<std::size_t>(chunk.group));
    return step;
}

void UpdateWorker::run_pass(Layer& layer, Chunk& chunk, const Work& work) {
    switch (work.job->pass) {
        case Pass::kUpdate:
            run_update(layer, chunk, work.slot);
            break;
        case Pass::kDirect:
            run_direct(layer, chunk, work.slot);
            break;
        case Pass::kPreview: {
            const GradientStep step = gradient_step(layer, chunk, chunk.slot, current_);
            const Outgoing out = next_outgoing(chunk);
            timed(
                [&] { adam_preview(chunk.p, chunk.m, chunk.v, chunk.n, step, out, num_threads_); });
            send(chunk, out);
            break;
        }
        case Pass::kCommit:
            if (previous_) {
                const GradientStep step = gradient_step(layer, chunk, chunk.slot, *previous_);
                timed([&] {
                    adam_commit(chunk.p, chunk.m, chunk.v, chunk.n, step, Outgoing{}, num_threads_);
                });
                release_slot(chunk);
            }
            break;
        case Pass::kPublish:
            run_publish(chunk);
            break;
        case Pass::kDrop:
            release_slot(chunk);
            run_publish(chunk);
            break;
        case Pass::kWithdraw:
            return_gradient(layer, chunk, *work.job);
            release_slot(chunk);
            run_publish(chunk);
            break;
    }
    job_statistics_.elements += static_cast<std::int64_t>(chunk.n);
}

void UpdateWorker::run_update(const Layer& layer, Chunk& chunk, int slot) {
    const GradientStep current = gradient_step(layer, chunk, slot, current_);
    const Outgoing out = holding_ ? Outgoing{} : next_outgoing(chunk);
    if (previous_) {
        const GradientStep previous = gradient_step(layer, chunk, chunk.slot, *previous_);
        timed([&] {
            if (holding_) {
                adam_commit(chunk.p, chunk.m, chunk.v, chunk.n, previous, out, num_threads_);
            } else {
                adam_commit_then_preview(chunk.p, chunk.m, chunk.v, chunk.n, previous, current, out,
                                         num_threads_);
            }
        });
    } else if (!holding_) {
        timed(
            [&] { adam_preview(chunk.p, chunk.m, chunk.v, chunk.n, current, out, num_threads_); });
    }
    // Slots are swapped, not copied: the new gradient is the pending one from here on.
    release_slot(chunk);
    chunk.slot = slot;
    if (!holding_) send(chunk, out);
}

void UpdateWorker::run_direct(const Layer& layer, Chunk& chunk, int slot) {
    const GradientStep step = gradient_step(layer, chunk, slot, current_);
    const Outgoing out = next_outgoing(chunk);
    timed([&] { adam_commit(chunk.p, chunk.m, chunk.v, chunk.n, step, out, num_threads_); });
    slots_[static_cast<std::size_t>(chunk.slot_class)].free.push_back(slot);
    send(chunk, out);
}

void UpdateWorker::run_publish(const Chunk& chunk) {
    const Outgoing out = next_outgoing(chunk);
    timed([&] { adam_publish(chunk.p, chunk.n, out, num_threads_); });
    send(chunk, out);
}

void UpdateWorker::return_gradient(const Layer& layer, const Chunk& chunk, const Job& job) {
    if (chunk.slot < 0) throw std::logic_error("a withdrawn gradient has no slot");
    const SlotClass& slots = slots_[static_cast<std::size_t>(chunk.slot_class)];
    const EventHandle event = slots.events[static_cast<std::size_t>(chunk.slot)];
    const std::size_t size = size_of(layer.gradient_dtype);
    // Whoever used that device memory before must be done with it.
    device_->lane_wait(Lane::kToDevice, job.gradient_ready);
    device_->copy(Lane::kToDevice, job.withdraw_to + chunk.shard_offset * size,
                  slots.address(chunk.slot), chunk.n * size);
    device_->record(event, Lane::kToDevice);
    // The slot is released next: the copy out of it must have completed.
    wait_event(event);
}

Outgoing UpdateWorker::next_outgoing(const Chunk& chunk) {
    const std::size_t buffer = next_outgoing_++ % outgoing_.events.size();
    // The copy that last used the buffer must have left it.
    job_statistics_.wait_outgoing_ns += wait_event(outgoing_.events[buffer]);
    // Stored through the cache: the copy engine reads the buffer soon after.
    return Outgoing{outgoing_.address(static_cast<int>(buffer)), chunk.weights_dtype, false};
}

void UpdateWorker::send(const Chunk& chunk, const Outgoing& out) {
    delay();
    const std::size_t buffer = (next_outgoing_ - 1) % outgoing_.events.size();
    const std::int64_t begin = now_ns();
    device_->copy(Lane::kToDevice, chunk.weights, out.data, chunk.n * size_of(chunk.weights_dtype));
    device_->record(outgoing_.events[buffer], Lane::kToDevice);
    job_statistics_.issue_ns += now_ns() - begin;
}

void UpdateWorker::release_slot(Chunk& chunk) {
    if (chunk.slot < 0) return;
    slots_[static_cast<std::size_t>(chunk.slot_class)].free.push_back(chunk.slot);
    chunk.slot = -1;
}

template <typename Function>
void UpdateWorker::timed(Function function) {
    const std::int64_t begin = now_ns();
    function();
    const std::int64_t taken = now_ns() - begin;
    job_statistics_.kernel_ns += taken;
    span_.kernel_ns += taken;
}

void UpdateWorker::finish_job(const Work& work) {
    Layer& layer = layers_[static_cast<std::size_t>(work.job->layer)];
    delay();
    // Recorded before the caller is told, so that a wait on it is never a wait on an older record.
    device_->record(layer.ready, Lane::kToDevice);
    span_.end_ns = now_ns();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        for (auto job = jobs_.begin(); job != jobs_.end(); ++job) {
            if (*job == work.job) {
                jobs_.erase(job);
                break;
            }
        }
        if (fetches(work.job->pass)) layer.fetched = true;
        --layer.outstanding;
        statistics_.kernel_ns += job_statistics_.kernel_ns;
        statistics_.wait_gradient_ns += job_statistics_.wait_gradient_ns;
        statistics_.wait_outgoing_ns += job_statistics_.wait_outgoing_ns;
        statistics_.issue_ns += job_statistics_.issue_ns;
        statistics_.elements += job_statistics_.elements;
        ++statistics_.jobs;
        if (spans_.size() < kMaxSpans) spans_.push_back(span_);
    }
    job_statistics_ = WorkerStatistics{};
    changed_.notify_all();
}

// Polls: the device has no way to wake a host thread that is cheaper than a short sleep.
std::int64_t UpdateWorker::wait_event(EventHandle event) {
    if (device_->is_complete(event)) return 0;
    const std::int64_t begin = now_ns();
    for (int polls = 0; !device_->is_complete(event); ++polls) {
        if (stop_) throw std::runtime_error("closed while waiting for a copy");
        if (polls < 200) {
            std::this_thread::yield();
        } else {
            std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
    }
    return now_ns() - begin;
}

void UpdateWorker::delay() {
    if (max_delay_us_ == 0) return;
    std::this_thread::sleep_for(std::chrono::microseconds(random_() % (max_delay_us_ + 1)));
}

}  // namespace hytrain
