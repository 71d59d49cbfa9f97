// The update worker: what callers use. The thread itself is in update_loop.cpp.
#include "hytrain/update_worker.h"

#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace hytrain {

namespace {

bool same(const AdamHyper& a, const AdamHyper& b) {
    return a.lr == b.lr && a.beta1 == b.beta1 && a.beta2 == b.beta2 && a.eps == b.eps &&
           a.weight_decay == b.weight_decay && a.step == b.step &&
           a.decoupled_decay == b.decoupled_decay && a.bias_correction == b.bias_correction;
}

}  // namespace

bool StepRecord::operator==(const StepRecord& other) const {
    return scale == other.scale && hyper.size() == other.hyper.size() &&
           std::equal(hyper.begin(), hyper.end(), other.hyper.begin(), same);
}

UpdateWorker::UpdateWorker(std::unique_ptr<Device> device, int num_threads,
                           std::uint64_t delay_seed, unsigned max_delay_us)
    : device_(std::move(device)),
      num_threads_(num_threads),
      wanted_threads_(num_threads),
      random_(delay_seed),
      max_delay_us_(max_delay_us),
      process_(static_cast<long>(getpid())) {}

UpdateWorker::~UpdateWorker() {
    close();
    for (EventHandle event : own_events_) device_->destroy_event(event);
}

int UpdateWorker::add_slot_class(std::size_t slot_bytes) {
    slots_.emplace_back();
    slots_.back().slots.bytes = slot_bytes;
    return static_cast<int>(slots_.size()) - 1;
}

void UpdateWorker::add_slots(int slot_class, char* base, std::size_t bytes, int count) {
    device_->attach_thread();  // this is a caller's thread: CUDA events need a current context
    Growth growth;
    growth.slot_class = slot_class;
    growth.buffers.bytes = bytes;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        throw_if_failed();
        for (int i = 0; i < count; ++i) {
            growth.buffers.addresses.push_back(base + static_cast<std::size_t>(i) * bytes);
            if (!spare_events_.empty()) {
                growth.buffers.begins.push_back(spare_events_.back().first);
                growth.buffers.ends.push_back(spare_events_.back().second);
                spare_events_.pop_back();
                continue;
            }
            for (auto* events : {&growth.buffers.begins, &growth.buffers.ends}) {
                events->push_back(device_->create_event(true));
                own_events_.push_back(events->back());
            }
        }
        // The worker adds them to its lists itself (absorb_growth): it reads the lists without a
        // lock, and an append here could reallocate them under it.
        growth_.push_back(std::move(growth));
        has_growth_ = true;
    }
    wake_.notify_one();
}

void UpdateWorker::retire_slots(int slot_class, const char* base, std::size_t bytes) {
    Retirement retirement;
    retirement.slot_class = slot_class;
    retirement.base = base;
    retirement.bytes = bytes;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        throw_if_failed();
        // Only the worker may change the lists of slots: see absorb_growth.
        retirements_.push_back(retirement);
        has_growth_ = true;
    }
    wake_.notify_one();  // there may be no layer left on the host whose job would wake it
}

bool UpdateWorker::is_retiring(const char* base) {
    std::lock_guard<std::mutex> lock(mutex_);
    throw_if_failed();
    for (std::size_t i = 0; i < retirements_.size(); ++i) {
        if (retirements_[i].base != base) continue;
        if (!retirements_[i].taken || retirements_[i].used != 0) return true;
        retirements_.erase(retirements_.begin() + static_cast<std::ptrdiff_t>(i));
        return false;
    }
    return false;
}

int UpdateWorker::add_layer(std::string name, DType gradient_dtype, EventHandle ready,
                            double* norm_slot, const StateArrays& state,
                            std::vector<Chunk> chunks) {
    if (chunks.empty()) throw std::invalid_argument("layer '" + name + "' has no chunks");
    Layer layer;
    layer.name = std::move(name);
    layer.gradient_dtype = gradient_dtype;
    layer.ready = ready;
    if (ready == kNoEvent) {
        layer.ready = device_->create_event(false);
        own_events_.push_back(layer.ready);
    }
    layer.norm_slot = norm_slot;
    layer.state = state;
    layer.split = state.split;
    layer.chunks = std::move(chunks);
    layers_.push_back(std::move(layer));
    return static_cast<int>(layers_.size()) - 1;
}

void UpdateWorker::move_weights(int layer, const std::vector<void*>& addresses) {
    // The worker reads chunks without the lock, but only those of jobs that it has taken from the
    // queue: under the lock, with no job of the layer left, none is read, and the next job comes
    // after this.
    std::lock_guard<std::mutex> lock(mutex_);
    throw_if_failed();
    Layer& moved = layers_.at(static_cast<std::size_t>(layer));
    if (moved.chunks.size() != addresses.size()) {
        throw std::invalid_argument("layer '" + moved.name + "' has another number of chunks");
    }
    if (moved.outstanding != 0 || moved.moving != 0 || moved.settling != 0) {
        throw std::logic_error("the weights of layer '" + moved.name + "' are still to be written");
    }
    for (std::size_t i = 0; i < addresses.size(); ++i) moved.chunks[i].weights = addresses[i];
}

void UpdateWorker::start() {
    thread_ = std::thread([this] { run(); });
}

bool UpdateWorker::in_own_process() const { return process_ == static_cast<long>(getpid()); }

void UpdateWorker::close() noexcept {
    if (!in_own_process()) return;
    {
        // stop_ is atomic, but set under the lock: otherwise the worker could test it before and
        // sleep after the notification, and join() would never return.
        std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
        if (error_.empty()) error_ = "the update worker was closed";
    }
    wake_.notify_all();
    changed_.notify_all();  // callers that wait for a layer get the error instead of hanging
    if (thread_.joinable()) thread_.join();
    // Copies in flight must end: the caller is about to unmap the memory that they use.
    device_->stop();
}

void UpdateWorker::throw_if_failed() {
    if (!error_.empty()) throw WorkerError(error_);
}

void UpdateWorker::check_error() {
    std::lock_guard<std::mutex> lock(mutex_);
    throw_if_failed();
}

void UpdateWorker::begin_step(double sum_of_squares_limit) {
    std::lock_guard<std::mutex> lock(mutex_);
    throw_if_failed();
    limit_ = sum_of_squares_limit;
    running_sum_ = 0.0;
}

void UpdateWorker::submit(Job job) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        throw_if_failed();
        Layer& layer = layers_.at(static_cast<std::size_t>(job.layer));
        // Counted before the job is visible: a wait that comes next must not find the layer idle.
        ++count(layer, job.pass);
        // The caller keeps the gradient's memory until `fetched` is set: its copy has completed.
        if (job.pass == Pass::kUpdate || job.pass == Pass::kDirect) layer.fetched = false;
        // The form at the time the job will run: all moves before it have been submitted.
        job.split = layer.split;
        job.sequence = sequence_++;
        job.step = trace_step_;
        jobs_.push_back(std::make_shared<Job>(std::move(job)));
    }
    wake_.notify_one();
}

void UpdateWorker::submit_move(Job job) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        throw_if_failed();
        Layer& layer = layers_.at(static_cast<std::size_t>(job.layer));
        // Set now, not when the state arrives: the step may become final before that.
        if (job.pass == Pass::kArrive) layer.split = job.host_state.split;
        ++count(layer, job.pass);
        job.sequence = sequence_++;
        job.step = trace_step_;
        jobs_.push_back(std::make_shared<Job>(std::move(job)));
    }
    wake_.notify_one();
}

bool UpdateWorker::cancel_update(int layer) {
    std::lock_guard<std::mutex> lock(mutex_);
    throw_if_failed();
    for (const auto& job : jobs_) {
        const bool is_update = job->pass == Pass::kUpdate || job->pass == Pass::kDirect;
        // `started` is set under the same lock (begin_job): either the job sees that it is
        // cancelled and touches no state, or it has begun and cannot be cancelled any more.
        if (job->layer == layer && is_update && !job->started && !job->cancelled) {
            job->cancelled = true;
            return true;
        }
    }
    return false;
}

// Under mutex_. The layers whose previewed gradient a drop or a withdrawal will take back.
std::vector<bool> UpdateWorker::layers_taken_back() {
    std::vector<bool> found(layers_.size(), false);
    for (const auto& job : jobs_) {
        if (job->started || (job->pass != Pass::kDrop && job->pass != Pass::kWithdraw)) continue;
        const Layer& layer = layers_[static_cast<std::size_t>(job->layer)];
        // The end of a step waits for the moves of the layers that take part in it, so a layer that
        // still has a gradient of the step before cannot be moving.
        if (layer.tentative && layer.moving != 0) {
            error_ = "layer '" + layer.name + "' moves and has not begun to give up the gradient " +
                     "that was " + (job->pass == Pass::kDrop ? "dropped" : "withdrawn") +
                     ": the next step was made final without waiting for its move";
            changed_.notify_all();
            throw WorkerError(error_);
        }
        found[static_cast<std::size_t>(job->layer)] = true;
    }
    return found;
}

// Under mutex_. A pass over a layer that fetches no gradient.
void UpdateWorker::push_pass(Pass pass, std::size_t layer) {
    auto job = std::make_shared<Job>();
    job->pass = pass;
    job->layer = static_cast<int>(layer);
    job->sequence = sequence_++;
    job->step = trace_step_;
    ++layers_[layer].outstanding;
    jobs_.push_back(std::move(job));
}

int UpdateWorker::finalize(const StepRecord& record) {
    int again = 0;
    {
        // One critical section for all layers: the worker must not begin a job in between, which
        // would then be missed both as a job to amend and as a layer to preview again.
        std::lock_guard<std::mutex> lock(mutex_);
        throw_if_failed();
        const std::vector<bool> taken_back = layers_taken_back();
        std::vector<std::size_t> late;
        for (const auto& job : jobs_) {
            // Not begun: the one pass it will make is already the final one. A job of an earlier
            // step that is still waiting keeps that step's outcome.
            if (job->pass == Pass::kUpdate && !job->started && !job->cancelled && !job->final) {
                job->record = record;
                job->final = true;
                const auto layer = static_cast<std::size_t>(job->layer);
                if (layers_[layer].split) late.push_back(layer);
            }
        }
        // Behind their updates, which only fetch the gradient.
        for (const std::size_t layer : late) push_pass(Pass::kLate, layer);
        for (std::size_t i = 0; i < layers_.size(); ++i) {
            Layer& layer = layers_[i];
            // A gradient that is being taken back belongs to a step that was decided before.
            if (!layer.tentative || taken_back[i]) continue;
            layer.tentative = false;
            layer.pending = record;
            if (!layer.held && layer.previewed == record) continue;
            layer.held = false;
            ++again;
            push_pass(layer.split ? Pass::kLate : Pass::kPreview, i);
        }
    }
    wake_.notify_one();
    return again;
}

template <typename Predicate>
void UpdateWorker::wait_for(Predicate predicate) {
    std::unique_lock<std::mutex> lock(mutex_);
    // The error is part of the condition: a worker that has failed finishes no job, and the caller
    // would wait for ever.
    const auto is_over = [&] { return !error_.empty() || predicate(); };
    if (!stall_report_) {
        changed_.wait(lock, is_over);
    } else {
        std::uint64_t seen = chunks_done_;
        bool told = false;
        while (!changed_.wait_for(lock, stall_after_, is_over)) {
            const std::uint64_t done = chunks_done_;
            if (done == seen && !told) {
                told = true;
                const std::size_t left = jobs_.size();
                lock.unlock();  // the report may take a while, and the worker must go on
                stall_report_(describe_tasks(left));
                lock.lock();
            }
            seen = done;
        }
    }
    throw_if_failed();
}

void UpdateWorker::wait_issued(int layer) {
    Layer& waited = layers_.at(static_cast<std::size_t>(layer));
    wait_for([&] { return waited.outstanding == 0; });
}

void UpdateWorker::wait_complete(int layer) {
    wait_issued(layer);  // first: before that the event's latest record is an earlier update's
    device_->attach_thread();
    wait_event(layers_.at(static_cast<std::size_t>(layer)).ready);
}

void UpdateWorker::wait_all() {
    wait_for([&] {
        return std::all_of(layers_.begin(), layers_.end(), [](const Layer& layer) {
            return layer.outstanding == 0 && layer.moving == 0 && layer.settling == 0 &&
                   layer.capturing == 0;
        });
    });
}

void UpdateWorker::wait_settled(int layer) {
    Layer& waited = layers_.at(static_cast<std::size_t>(layer));
    wait_for([&] { return waited.settling == 0; });
}

void UpdateWorker::wait_captured(int layer) {
    const Capture& waited = layers_.at(static_cast<std::size_t>(layer)).capture;
    wait_for([&] { return !waited.wanted && !waited.running; });
}

void UpdateWorker::wait_moved(int layer) {
    Layer& waited = layers_.at(static_cast<std::size_t>(layer));
    wait_for([&] { return waited.moving == 0; });
}

bool UpdateWorker::is_moving(int layer) {
    std::lock_guard<std::mutex> lock(mutex_);
    throw_if_failed();
    return layers_.at(static_cast<std::size_t>(layer)).moving != 0;
}

void UpdateWorker::wait_fetched(const std::vector<int>& layers) {
    wait_for([&] {
        return std::any_of(layers.begin(), layers.end(), [&](int layer) {
            return layers_.at(static_cast<std::size_t>(layer)).fetched;
        });
    });
}

bool UpdateWorker::is_fetched(int layer) {
    std::lock_guard<std::mutex> lock(mutex_);
    throw_if_failed();
    return layers_.at(static_cast<std::size_t>(layer)).fetched;
}

bool UpdateWorker::has_pending(int layer) {
    std::lock_guard<std::mutex> lock(mutex_);
    throw_if_failed();
    return layers_.at(static_cast<std::size_t>(layer)).pending.has_value();
}

WorkerStatistics UpdateWorker::take_statistics() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(statistics_, WorkerStatistics{});
}

void UpdateWorker::set_num_threads(int num_threads) {
    if (num_threads < 1) throw std::invalid_argument("an update needs at least one thread");
    wanted_threads_.store(num_threads, std::memory_order_relaxed);
}

std::vector<JobSpan> UpdateWorker::take_spans() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(spans_, {});
}

}  // namespace hytrain
