// The update worker's thread: pick a job, fetch its gradient, run its pass, send the result.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <utility>

#include "hytrain/clock.h"
#include "hytrain/update_worker.h"

namespace hytrain {

namespace {

// Fetches are issued this many chunks ahead, of at most two jobs: enough to hide a copy behind the
// kernel. More would fix the order of the layers too early (with direct commit all slots are free):
// small layers of one chunk each would be updated in the order in which their gradients came, the
// lowest layer last, and forward would wait for it.
constexpr std::size_t kMaxActive = 8;
constexpr std::ptrdiff_t kMaxJobs = 2;
// Jobs that together have fewer elements finish before the copy of the next one would.
constexpr std::size_t kLeastAhead = 1U << 20U;
constexpr std::size_t kMaxSpans = 1U << 16U;

bool fetches(Pass pass) { return pass == Pass::kUpdate || pass == Pass::kDirect; }
bool reads_copy(const Job& job) {
    return job.pass == Pass::kLate || (job.pass == Pass::kDirect && job.split);
}
bool is_move(Pass pass) { return pass == Pass::kLeave || pass == Pass::kArrive; }

}  // namespace

void UpdateWorker::run() {
    const Layer* layer = nullptr;
    try {
        device_->attach_thread();
        for (;;) {
            // The worker may sleep only if it has nothing begun: no notification comes for work
            // that it has already picked.
            if (active_.empty() && !fetching_) {
                // Poll: without this a trace's last copies would be noted only at the next job,
                // which may never come.
                const bool flying = trace_sent();
                const auto is_due = [&] { return stop_ || has_growth_ || has_job(); };
                std::unique_lock<std::mutex> lock(mutex_);
                if (flying) {
                    wake_.wait_for(lock, kTracePoll, is_due);
                } else {
                    wake_.wait(lock, is_due);
                }
            }
            if (stop_) return;
            // A job that was picked before may be waiting for a free slot.
            if (has_growth_) {
                std::lock_guard<std::mutex> lock(mutex_);
                absorb_growth();
            }
            while (issue_next()) {
            }
            if (active_.empty()) continue;
            const Work work = active_.front();
            active_.pop_front();
            layer = &layers_[static_cast<std::size_t>(work.job->layer)];
            // Only here: the number of threads must not change within a chunk.
            num_threads_ = wanted_threads_.load(std::memory_order_relaxed);
            process(work);
        }
    } catch (const std::exception& error) {
        fail(std::string("the update worker failed") +
             (layer != nullptr ? " at layer '" + layer->name + "'" : std::string()) + ": " +
             error.what());
    }
}

// How many jobs of a kind a layer has.
int& UpdateWorker::count(Layer& layer, Pass pass) {
    if (pass == Pass::kSettle) return layer.settling;
    if (pass == Pass::kCapture) return layer.capturing;
    return is_move(pass) ? layer.moving : layer.outstanding;
}

// Under mutex_.
bool UpdateWorker::has_job() {
    for (const auto& job : jobs_) {
        if (!job->picked) return true;
    }
    return owed_ != 0 && std::any_of(layers_.begin(), layers_.end(), can_capture);
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

// The lowest layer whose gradient is there. A move waits for all jobs that were there before it and
// goes before all later ones: its layer's next update needs it.
//
// The lowest layer first, because the next forward needs the low layers first, and while
// it climbs from there the worker still has the last layers to do, whose gradients came first: in
// order of arrival they would be done early, and the worker would stand still from its last low
// layer until the next step's first gradient. If none is there, the oldest will be the next.
std::shared_ptr<Job> UpdateWorker::pick_job() {
    std::lock_guard<std::mutex> lock(mutex_);
    // The memory that a job needs was added before the job. Without this line a job could be picked
    // before its memory: the first layer that moves to the host needs buffers to move through.
    absorb_growth();
    std::shared_ptr<Job> oldest;
    std::shared_ptr<Job> first;
    std::vector<bool> behind(layers_.size(), false);  // an earlier job of the layer
    for (const auto& job : jobs_) {
        if (job->picked) continue;
        const auto layer = static_cast<std::size_t>(job->layer);
        const bool in_order = !behind[layer];
        behind[layer] = true;
        if (is_move(job->pass) && oldest) break;
        if (!oldest) oldest = job;
        if (is_move(job->pass)) break;
        // Jobs of one layer keep their order: one that waits for no gradient would otherwise go
        // before an update whose gradient has yet to come, and commit nothing.
        if (in_order && (!first || job->layer < first->layer) && is_ready(*job)) first = job;
    }
    // Nothing is begun and no gradient is there: the worker would be idle.
    const bool is_idle = !first && active_.empty() && !(oldest && is_move(oldest->pass));
    std::shared_ptr<Job> picked = is_idle ? owed_capture() : nullptr;
    if (!picked) picked = first ? first : oldest;
    if (picked) picked->picked = true;
    return picked;
}

// Whether the next job may be picked later, and the order of the layers stays open until then.
bool UpdateWorker::is_far_ahead() const {
    const auto is_last = [](const Work& work) { return work.last; };
    if (std::count_if(active_.begin(), active_.end(), is_last) < kMaxJobs) return false;
    std::size_t ahead = 0;  // behind the first chunk, during which the others' copies are made
    for (auto work = active_.begin() + 1; work != active_.end(); ++work) {
        ahead += layers_[static_cast<std::size_t>(work->job->layer)].chunks[work->chunk].n;
    }
    return ahead >= kLeastAhead;
}

// Queues the next chunk's copy to the host, if a slot is free. False: nothing more to issue now.
bool UpdateWorker::issue_next() {
    if (active_.size() >= kMaxActive) return false;
    if (!fetching_) {
        if (is_far_ahead()) return false;
        delay();
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
    // All slots hold data that a pass has yet to read: nothing may be copied there now.
    if (!take_memory(chunk, work)) return false;
    if (work.slot >= 0 || work.copy >= 0) {
        delay();
        fetch(layer, chunk, work);
    }
    active_.push_back(std::move(work));
    ++fetching_chunk_;
    if (active_.back().last) fetching_.reset();
    return true;
}

// Takes memory for what the job fetches of a chunk, its gradient and its training copy: for both or
// for neither.
bool UpdateWorker::take_memory(const Chunk& chunk, Work& work) {
    const bool gradient = fetches(work.job->pass);
    const bool copy = reads_copy(*work.job) && !chunk.weights_on_host;
    std::vector<int>& slots = slots_[static_cast<std::size_t>(chunk.slot_class)].free;
    if (gradient && slots.empty()) return false;
    if (copy && !can_take_outgoing()) return false;
    if (gradient) {
        work.slot = slots.back();
        slots.pop_back();
    }
    if (copy) work.copy = take_outgoing();
    return true;
}

// Whether a chunk may take an outgoing buffer ahead of its turn. One must stay free: an earlier
// chunk that writes its copy, or a move, would otherwise find none. And while there is other work,
// the worker does not wait for a buffer's earlier copy.
bool UpdateWorker::can_take_outgoing() {
    if (active_.empty()) return true;
    if (free_outgoing_.size() < 2) return false;
    return device_->is_complete(outgoing_.ends[static_cast<std::size_t>(free_outgoing_.front())]);
}

// Issues the copies of a chunk's gradient and training copy into their slots.
void UpdateWorker::fetch(const Layer& layer, const Chunk& chunk, const Work& work) {
    const Job& job = *work.job;
    const std::int64_t begin = now_ns();
    if (work.chunk == 0 && work.slot >= 0) {
        // Without this wait the copy could read the gradient, or its sum of squares, before the
        // kernel has written it. Once a job: the chunks' copies follow on the same lane.
        device_->lane_wait(Lane::kToHost, job.gradient_ready);
        // Before the first chunk's copy, so that the chunk's event covers it (begin_job reads it).
        if (job.sum_of_squares != nullptr) {
            device_->copy(Lane::kToHost, layer.norm_slot, job.sum_of_squares, sizeof(double));
        }
    }
    const Place place{job.step, job.layer, static_cast<std::int32_t>(work.chunk)};
    if (work.slot >= 0) {
        const std::size_t size = size_of(layer.gradient_dtype);
        fetch_to(slots_[static_cast<std::size_t>(chunk.slot_class)].slots, work.slot,
                 job.gradient + chunk.shard_offset * size, chunk.n * size, "gradient", place);
    }
    if (work.copy >= 0) {
        // No wait is needed: the copy was last written in the previous step, this step's forward
        // has waited for that, and compute is past the forward, since kDirect waits for the
        // gradient's event and kLate comes after the host has read the step's outcome.
        fetch_to(outgoing_, work.copy, chunk.weights, chunk.n * size_of(chunk.weights_dtype),
                 "weights", place);
    }
    job_statistics_.issue_ns += now_ns() - begin;
}

void UpdateWorker::fetch_to(const Buffers& buffers, int number, const void* from, std::size_t bytes,
                            const char* what, const Place& place) {
    const auto index = static_cast<std::size_t>(number);
    device_->record(buffers.begins[index], Lane::kToHost);
    device_->copy(Lane::kToHost, buffers.addresses[index], from, bytes);
    device_->record(buffers.ends[index], Lane::kToHost);
    note(kToHostTask, what, place, buffers.ends[index]);
}

// Waits for what was fetched: the kernel must not read it before the copy is done.
void UpdateWorker::arrived(const Buffers& buffers, int number, std::size_t num_bytes, SpanKind kind,
                           std::int32_t slot) {
    const auto index = static_cast<std::size_t>(number);
    waits_for_ = kind == SpanKind::kGradientToHost ? "its gradient's copy to the host"
                                                   : "its weights' copy to the host";
    const std::int64_t waited = wait_event(buffers.ends[index]);
    waits_for_ = nullptr;
    job_statistics_.wait_gradient_ns += waited;
    span_.wait_gradient_ns += waited;
    job_statistics_.to_host_ns += device_->elapsed_ns(buffers.begins[index], buffers.ends[index]);
    const auto bytes = static_cast<std::int64_t>(num_bytes);
    job_statistics_.to_host_bytes += bytes;
    trace_copy(kind, place_, buffers.begins[index], buffers.ends[index], bytes, slot);
}

// Under mutex_. Adds new pinned buffers and removes those that are to be retired. Apart from that
// only the worker touches the lists, without a lock.
void UpdateWorker::absorb_growth() {
    if (!has_growth_) return;
    for (const Growth& growth : growth_) absorb(growth);
    // After the growth: slots that were just added may be retired already.
    for (Retirement& retirement : retirements_) absorb(retirement);
    outgoing_sent_.resize(outgoing_.addresses.size());
    growth_.clear();
    has_growth_ = false;
}

void UpdateWorker::absorb(const Growth& growth) {
    SlotClass* const slots = growth.slot_class == kOutgoing
                                 ? nullptr
                                 : &slots_.at(static_cast<std::size_t>(growth.slot_class));
    Buffers& to = slots != nullptr ? slots->slots : outgoing_;
    for (std::size_t i = 0; i < growth.buffers.addresses.size(); ++i) {
        const auto number = static_cast<int>(to.addresses.size());
        if (slots != nullptr) {
            slots->free.push_back(number);
            slots->retired.push_back(false);
        } else {
            free_outgoing_.push_back(number);
        }
        to.addresses.push_back(growth.buffers.addresses[i]);
        to.begins.push_back(growth.buffers.begins[i]);
        to.ends.push_back(growth.buffers.ends[i]);
    }
    to.bytes = growth.buffers.bytes;
}

// Under mutex_. Slots in use, which hold a gradient or wait for one, stay until they are freed.
void UpdateWorker::absorb(Retirement& retirement) {
    if (retirement.taken) return;
    retirement.taken = true;
    SlotClass& slots = slots_.at(static_cast<std::size_t>(retirement.slot_class));
    for (std::size_t i = 0; i < slots.slots.addresses.size(); ++i) {
        if (slots.retired[i] || !retirement.holds(slots.slots.addresses[i])) continue;
        slots.retired[i] = true;
        ++retirement.used;
    }
    const auto is_retired = [&](int slot) { return slots.retired[static_cast<std::size_t>(slot)]; };
    const auto kept = std::stable_partition(slots.free.begin(), slots.free.end(),
                                            [&](int slot) { return !is_retired(slot); });
    for (auto slot = kept; slot != slots.free.end(); ++slot) slot_gone(slots, *slot);
    slots.free.erase(kept, slots.free.end());
}

// Under mutex_. The slot's last copies have completed: see free_slot.
void UpdateWorker::slot_gone(const SlotClass& slots, int slot) {
    const auto index = static_cast<std::size_t>(slot);
    spare_events_.emplace_back(slots.slots.begins[index], slots.slots.ends[index]);
    for (Retirement& retirement : retirements_) {
        if (retirement.holds(slots.slots.addresses[index])) --retirement.used;
    }
}

// No copy of the slot may be in flight, and no pass may still read it.
void UpdateWorker::free_slot(int slot_class, int slot) {
    SlotClass& slots = slots_[static_cast<std::size_t>(slot_class)];
    if (!slots.retired[static_cast<std::size_t>(slot)]) {
        slots.free.push_back(slot);
        return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    slot_gone(slots, slot);
}

namespace {

const char* pass_name(Pass pass) {
    switch (pass) {
        case Pass::kUpdate:
            return "update";
        case Pass::kDirect:
            return "direct update";
        case Pass::kLate:
            return "late update";
        case Pass::kPreview:
            return "preview";
        case Pass::kCommit:
        case Pass::kSettle:
            return "commit";
        case Pass::kPublish:
            return "publish";
        case Pass::kDrop:
            return "drop";
        case Pass::kWithdraw:
            return "withdrawal";
        case Pass::kLeave:
            return "move to the device";
        case Pass::kArrive:
            return "move to the host";
        case Pass::kCapture:
            return "copy to be saved";
    }
    return "job";
}

}  // namespace

void UpdateWorker::process(const Work& work) {
    Job& job = *work.job;
    Layer& layer = layers_[static_cast<std::size_t>(job.layer)];
    Chunk& chunk = layer.chunks[work.chunk];
    place_ = Place{job.step, job.layer, static_cast<std::int32_t>(work.chunk)};
    gradient_dtype_ = layer.gradient_dtype;
    if (work.chunk == 0) {
        span_ = JobSpan{};
        span_.layer = job.layer;
        span_.pass = static_cast<int>(job.pass);
        span_.begin_ns = now_ns();
    }
    note(kUpdates, pass_name(job.pass), place_, kNoEvent);
    if (work.slot >= 0) {
        arrived(slots_[static_cast<std::size_t>(chunk.slot_class)].slots, work.slot,
                chunk.n * size_of(layer.gradient_dtype), SpanKind::kGradientToHost,
                chunk.slot_class << 16 | work.slot);
    }
    if (work.copy >= 0) {
        arrived(outgoing_, work.copy, chunk.n * size_of(chunk.weights_dtype),
                SpanKind::kWeightsToHost, static_cast<int>(slots_.size()) << 16 | work.copy);
    }
    delay();
    if (work.chunk == 0) begin_job(job, layer);
    // Read without the lock: begin_job has set `started`, after which it does not change.
    if (job.cancelled) {
        // After arrived(): the copies must have completed before their memory is used again.
        if (work.slot >= 0) free_slot(chunk.slot_class, work.slot);
        if (work.copy >= 0) free_outgoing_.push_front(work.copy);
    } else {
        run_pass(layer, chunk, work);
    }
    if (work.last) finish_job(work);
    ++chunks_done_;
}

// Decides, in one critical section, what the job commits and previews: finalize() sees either a
// job that has not started (and amends it) or a layer whose record it can replace.
void UpdateWorker::begin_job(Job& job, Layer& layer) {
    if (fail_at_ == job.layer) throw std::runtime_error("injected fault");
    std::lock_guard<std::mutex> lock(mutex_);
    job.started = true;
    span_.final = job.final;
    taking_ = Taking::kNo;
    if (job.cancelled) return;
    previous_.reset();
    taking_ = taking(job, layer);
    if (taking_ != Taking::kNo) {
        layer.capture.wanted = false;
        layer.capture.running = true;
        --owed_;
    }
    switch (job.pass) {
        case Pass::kUpdate:
            // Copied before the first chunk, which has arrived: see fetch().
            if (job.sum_of_squares != nullptr) running_sum_ += *layer.norm_slot;
            previous_ = std::move(layer.pending);
            span_.committed = previous_.has_value();
            current_ = job.record;
            layer.pending = job.record;
            layer.pending_sequence = job.sequence;
            layer.previewed = job.record;
            layer.tentative = !job.final;
            // Written so that a NaN sum holds as well.
            holding_ = layer.state.split || (!job.final && !(running_sum_ <= limit_));
            layer.held = holding_;
            break;
        case Pass::kDirect:
            current_ = job.record;
            break;
        case Pass::kLate:
            if (!layer.pending) throw std::logic_error("a late update with nothing pending");
            current_ = *layer.pending;
            layer.pending.reset();
            break;
        case Pass::kPreview:
            if (!layer.pending) throw std::logic_error("preview of a layer with nothing pending");
            current_ = *layer.pending;
            layer.previewed = current_;
            break;
        case Pass::kCommit:
        case Pass::kSettle:
        case Pass::kLeave:
            if (layer.tentative) throw std::logic_error("a step that is not final is committed");
            previous_ = std::move(layer.pending);
            layer.pending.reset();
            // Without this wait the copies could overwrite what compute still reads there.
            if (job.pass == Pass::kLeave) device_->lane_wait(Lane::kToDevice, job.gradient_ready);
            break;
        case Pass::kArrive:
            layer.state = job.host_state;
            // Without this wait the copies could read state that the last update still writes.
            device_->lane_wait(Lane::kToHost, job.gradient_ready);
            break;
        case Pass::kDrop:
        case Pass::kWithdraw:
            layer.pending.reset();
            layer.tentative = false;
            layer.held = false;
            break;
        case Pass::kCapture:
            // Not the gradient of a later step: its update has committed the copy's gradient.
            if (layer.pending && taking_ != Taking::kNo &&
                layer.pending_sequence < layer.capture.sequence) {
                previous_ = std::move(layer.pending);
                layer.pending.reset();
            }
            break;
        case Pass::kPublish:
            break;
    }
}

void UpdateWorker::finish_job(const Work& work) {
    Layer& layer = layers_[static_cast<std::size_t>(work.job->layer)];
    const bool moved = is_move(work.job->pass);
    delay();
    // Recorded before the caller is told, so that a wait on it is never a wait on an older record.
    // `ready` covers the weights only: neither moves nor settling, which change the state, record
    // it.
    const bool settled = work.job->pass == Pass::kSettle;
    const EventHandle event = moved ? work.job->moved : settled ? kNoEvent : layer.ready;
    if (event != kNoEvent) {
        device_->record(event, Lane::kToDevice);
    } else if (moved) {
        // There is no event by which the caller could wait for the copies: they complete now.
        for (EventHandle sent : outgoing_.ends) wait_event(sent);
    }
    if (work.job->pass == Pass::kLeave) layer.state = StateArrays{};
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
        if (taking_ != Taking::kNo) layer.capture.running = false;
        // The last action of a job: now callers may use the weights' event and free the gradient.
        --count(layer, work.job->pass);
        statistics_.kernel_ns += job_statistics_.kernel_ns;
        statistics_.wait_gradient_ns += job_statistics_.wait_gradient_ns;
        statistics_.wait_outgoing_ns += job_statistics_.wait_outgoing_ns;
        statistics_.issue_ns += job_statistics_.issue_ns;
        statistics_.elements += job_statistics_.elements;
        ++statistics_.jobs;
        statistics_.to_host_ns += job_statistics_.to_host_ns;
        statistics_.to_host_bytes += job_statistics_.to_host_bytes;
        statistics_.to_device_ns += job_statistics_.to_device_ns;
        statistics_.to_device_bytes += job_statistics_.to_device_bytes;
        if (spans_.size() < kMaxSpans) spans_.push_back(span_);
    }
    job_statistics_ = WorkerStatistics{};
    changed_.notify_all();
}

// Polls: no way for the device to wake a host thread is cheaper than a short sleep.
std::int64_t UpdateWorker::wait_event(EventHandle event) {
    if (device_->is_complete(event)) return 0;
    const std::int64_t begin = now_ns();
    for (int polls = 0; !device_->is_complete(event); ++polls) {
        // A copy may be behind a reduction that a failed rank never joins: without this, close()
        // would wait for this thread for ever.
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
